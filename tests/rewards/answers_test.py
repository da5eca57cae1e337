r"""Verdicts of answers as a careful human grader gives them, and one grade for one normal form."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.rewards import Outcome
from rlvr_jax.rewards.answers import parse_answer
from rlvr_jax.rewards.mathematics import mathematics

# gold | answer | = or !; an answer after @ is the full completion, others are in a box
VERDICTS = r"""
# numbers
5 | 5 | =
5 | 5.0 | =
5 | 05 | =
5 | +5 | =
-5 | - 5 | =
5 | -5 | !
0 | -0 | =
1234 | 1,234 | =
1,234,567 | 1234567 | =
1234 | 1{,}234 | =
10000 | 10\,000 | =
10000 | 10,\!000 | =
1/2 | 0.5 | =
\frac{1}{2} | 1/2 | =
\frac12 | \dfrac{1}{2} | =
\frac{2}{4} | \frac{1}{2} | =
\frac{-1}{2} | -\frac{1}{2} | =
\frac{1}{3} | 0.333333 | =
\frac{1}{3} | 0.33 | !
0.0000001 | 0 | !
3.14 | 3.1400 | =
3.14 | 3.15 | !
2\frac{1}{2} | 2.5 | =
2\frac12 | \frac52 | =
2 1/2 | 5/2 | =
-2\frac{1}{2} | -\frac{5}{2} | =
2\frac{1}{2} | 1 | !
0.\overline{3} | \frac{1}{3} | =
0.1\overline{6} | 1/6 | =
0.\overline{12} | 0.\overline{13} | !
1.2e-3 | 0.0012 | =
1.2\times10^{-3} | 1.2e-03 | =
10^3 | 1000 | =
10^{-3} | 0.001 | =
3\times 10^8 | 300000000 | =
2^{10} | 1024 | =
2^{10} | 1025 | !
123456789012345678901234567890 | 123456789012345678901234567891 | !
5! | 120 | =
\binom{5}{2} | 10 | =
101_2 | 101_{2} | =
101_2 | 101 | !
101 | 101_2 | =
11_2 | 11 | !
11_2 | 3 | !
101_2 | 101_3 | !
3:2 | 3:2 | =
3:2 | 2:3 | !
\sqrt{4} | 2 | =
300000000 | 3\times 10^8 | =
0.0012 | 1.2\cdot10^{-3} | =
-1500 | -1.5*10^{3} | =
1000 | 10^3 | =
5 | \frac{-10}{-2} | =
0.333 | 0.333\ldots | =
3 | 3^\text{rd} | =
21 | 21^{st} | =
22 | 22nd | =
4 | 4^{\text{th}} | =
4 | 5^{\text{th}} | !
5 | ５ | =
-12.5 | －１２．５ | =
(1,2) | （１，２） | =
# powers and roots
1024 | 2^{10} | =
1024 | 2^10 | =
1024 | 2^{11} | !
1/8 | 2^{-3} | =
\frac{8}{27} | \left(\frac{2}{3}\right)^3 | =
4 | (-2)^2 | =
4 | -2^2 | !
4 | \sqrt{16} | =
-4 | -\sqrt{16} | =
3 | \sqrt[3]{27} | =
\frac{1}{2} | \sqrt{\frac{1}{4}} | =
5 | \sqrt{25} | =
\sqrt{4},3 | 2, 3 | =
\sqrt{2} | \sqrt{3} | !
2^{9999} | 2^{9999} | =
0 | 0^{-1} | !
512 | 2^{3^2} | !
64 | (2^3)^2 | !
16 | \sqrt{\sqrt{65536}} | !
4 | \left(\sqrt{2}\right)^4 | !
8 | 16^{3/4} | !
4 | 64^{\frac13} | !
9 | 27^{2/3} | !
2^{3^2} | 512 | =
27^{2/3} | 9 | =
-\frac{8}{27} | \left(-\frac23\right)^3 | =
# no number but the way to one
391 | 17\cdot 23 | !
391 | 17 \times 23 | !
391 | x = 17*23 | !
391 | (17)(23) | !
391 | 17\cdot 23 = 391 | =
391 | 17\cdot 24 = 391 | !
391\text{ cm} | 17\cdot 23\text{ cm} | !
391,2 | 17\cdot 23, 2 | !
5 | 2+3 | !
5 | 7-2 | !
391 | 17\cdot23\leq x\leq 17\cdot23 | !
391 | x\geq 17\cdot23, x\leq 17\cdot23 | !
391 | [17\cdot23,17\cdot23]\cup[17\cdot23,17\cdot23] | !
391 | 391\leq x\leq 391 | !
x=391 | 17\cdot23\leq x\leq 17\cdot23 | !
\{391\} | 17\cdot23\leq x\leq 17\cdot23 | !
391,2 | x=2 \text{ or } 17\cdot23\leq x\leq 17\cdot23 | !
\{2,391\} | x=2 \text{ or } 17\cdot23\leq x\leq 17\cdot23 | !
3628800 | 10!\leq n\leq 10! | !
5 | x^2=25<26x | !
1,2 | x^2-3x+2=0<x+9 | !
(1,2),(3,4) | 1<x<2 \text{ or } 3<x<4 | =
5 | 6=5 | !
5 | 2+3=6 | !
5 | m+n=5 | =
5 | m+n=6 | !
5 | x \approx 5 | =
5 | 5 \mod 7 | !
5 | \sqrt{26} | !
5 | \sqrt{16}+1 | !
8 | 2^{10}/2^{7} | !
5 | \lfloor 5.5 \rfloor | !
5 | 5,5 | !
5050 | \sum_{n=1}^{100} n | !
5040 | \prod_{n=1}^{7} n | !
120 | \binom{10}{3} | !
3628800 | 10! | !
3 | \log_2 8 | !
6 | \gcd(12, 18) | !
\frac{1}{2} | \int_0^1 x dx | !
\frac{17}{23} | \frac{17}{23} | =
\frac{\pi}{2} | \int_{-1}^1 \sqrt{1-x^2} dx | !
\sqrt{2} | \lim_{x\to 2} \sqrt{x} | !
\sum_{k=1}^n k | \sum_{k=1}^{n} k | =
\sum_{k=1}^n k | \sum_{j=1}^{n} j | !
\int x dx | \int e^{x^2}\sin(x^3)\ln(x) dx | !
\int x dx | \int x\,dx | =
2x | \frac{d}{dx}(x^2) | !
2x | \frac{d(x^2)}{dx} | !
2x | \frac{\mathrm{d}}{\mathrm{d}x}x^2 | !
\frac{dy}{dx} = 2x | 2x=\frac{dy}{dx} | =
\frac{d}{x+1} | \frac{d}{1+x} | =
\frac{dy}{dx} = 2x | \frac{dy}{dx}=2x | =
# money, percent, units, degrees
18 | $18 | =
18 | \$18.00 | =
-5 | -\$5 | =
1000 | \$1,000 | =
50 | 50\% | =
50\% | 50 | =
50\% | 0.5 | =
0.5 | 50\% | =
50\% | \frac12 | =
50\% | 5 | !
50\% | 60\% | !
0.05 | 0.05\% | !
0.05 | 5\% | =
0.5\% | 0.5 | =
12.5 | 12.5\% | =
5 | 500\% | =
5 | 5\% | =
12 | 12 apples | =
12 | 12 \text{ apples} | =
5 \text{ cm} | 5 | =
5 \text{ cm} | 5 centimeters | =
5 \text{ cm} | 5\text{ m} | !
5 cm | 5 kg | !
5 | 5\text{ cm} | =
5 \text{ cm} | 6 \text{ cm} | !
12 \text{ cm}^2 | 12 square centimeters | =
12 \text{ cm}^2 | 12 \text{ cm} | !
60 \text{ miles per hour} | 60 mi/h | =
2\sqrt{3}\text{ cm} | 2\sqrt{3} | =
2\sqrt{3} | \sqrt{12}\text{ cm} | =
90^\circ | 90 | =
90 | 90^{\circ} | =
90 | 90 degrees | =
90^\circ | 45^\circ | !
5m | 5 | !
16\sqrt{2} | 16\sqrt{2}\text{ units} | =
16\sqrt{2} | 16\sqrt{2}\text{ square units} | =
16\sqrt{2} | 16\sqrt{2}\text{ units}^2 | =
16\sqrt{2} | 16\sqrt{2}\text{ dollars} | =
16\sqrt2\text{ square units} | 16\sqrt{2} | =
9\pi | 9\pi\text{ sq. units} | =
9 | 9 sq. units | =
2\sqrt{5} | 2\sqrt{5} meters | =
12\pi | 12\pi\, cm^3 | =
12\pi\text{ cm}^3 | 12\pi m^3 | !
5\text{ cm} | 5\text{ units} | =
9\pi\text{ m}^2 | 9\pi\text{ m}^2 | =
9\pi\text{ m}^2 | 9\pi\text{ m} | !
9\pi\text{ m}^2 | 9\pi\text{ square meters} | =
9\pi\text{ square meters} | 9\pi\text{ m}^2 | =
9\pi\text{ m}^2 | 8\pi\text{ m}^2 | !
2\sqrt{3}\text{ m}^3 | 2\sqrt{3}\text{ m}^3 | =
\frac{\pi}{2}\text{ m/s}^2 | \frac{\pi}{2}\text{ m/s}^2 | =
x+1\text{ m}^2 | 1+x\text{ m}^2 | =
5\text{ per hour} | 5\text{ per hour} | =
\pi\text{ per hour} | \pi\text{ per hour} | =
(1,2)\text{ cm}^2 | (1,2)\text{ cm}^2 | =
9.8 \mathrm{~m} / \mathrm{s}^{2} | 9.8 \mathrm{~m} / \mathrm{s}^{2} | =
9.8\text{ m/s}^2 | 9.8 \mathrm{~m} / \mathrm{s}^{2} | =
9.8 | 9.8 \mathrm{~m} / \mathrm{s}^{2} | =
5 | 5\,\mathrm{~m} / \mathrm{s} | =
5\text{ m/s} | 5\,\mathrm{~m} / \mathrm{s} | =
5\text{ m/s} | 5\,\mathrm{m} | !
5 | 5 \mathrm{m}/\mathrm{s} | =
# words that change a number
5 | 5 \text{ million} | !
5 | 5 hundred | !
5 | 5\text{ squared} | !
25 | 25 units squared | =
5 | 5 factorial | !
5 | 5 minus three | !
5 | 5\text{ plus six} | !
3 | 3 over four | !
6 | 6\text{ hundredths} | !
6 | 6 fourth graders | =
6 | 6 times | =
6 | 6 one-dollar bills | =
4\text{ billion} | 4\text{ million} | !
4\text{ billion} | 4000 million dollars | =
5000000 | 5\text{ million} | =
5\text{ million} | 5,000,000\text{ people} | =
5\text{ million} | 5 | !
2\sqrt{3} | 2\sqrt{3}\text{ million} | !
# bases
11_{\text{two}} | 11 | !
11_{\text{two}} | 11_2 | =
101_2 | 101_{\text{two}} | =
1011_2 | (1011)_2 | =
1011_2 | 1011_{(2)} | =
1011_2 | 1011_{two} | =
1011_2 | 1011_{three} | !
1011_2 | 1011\text{ base two} | =
5m | 5m | =
# formulas
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}} | =
\sqrt2 | \sqrt{2} | =
\sqrt{2} | 1.414 | !
\frac{\pi}{4} | \pi/4 | =
2\pi r | 2 r \pi | =
x+1 | 1+x | =
x^2-1 | (x-1)(x+1) | =
x^2-1 | (x-1)^2 | !
(x+1)^2 | x^2+2x+1 | =
\frac{x}{2} | 0.5x | =
x+1 | y+1 | !
|x| | x | !
\log_2 8 | 3 | =
\sin(\pi/6) | \frac12 | =
3+4i | 4i+3 | =
3+4i | 3-4i | !
e^{2x} | e^{x}e^{x} | =
\left(\frac{1}{2}\right)^3 | \frac{1}{8} | =
-x^2 | x^2 | !
\infty | -\infty | !
# names and equations
5 | x = 5 | =
x = 5 | 5 | =
x=5 | x = 5.0 | =
x=5 | y=5 | !
x=5 | 5=5 | !
x=5 | 2+3=5 | !
x=5 | m+n=5 | !
x=5 | 5=x | =
x=5 | 5=y | !
x=5 | x \approx 5 | =
5 | 5=x | =
x=1,y=2 | 1=x,2=y | =
2R | 2r | =
x=5 | x=6 | !
y = 2x+3 | 2x + 3 | =
y=2x+3 | y-2x=3 | =
y=2x+3 | y=3x+2 | !
2x+3 | y=2x+3 | =
f(x)=x^2 | x^2 | =
5 | 2+3=5 | =
5 | x = 2 + 3 = 5 | =
6 | x=5=6 | !
x=6 | x=5=6 | !
5 | x=2+4=5 | !
5 | a=b=5 | =
5\text{ cm} | x = 2+3 = 5\text{ cm} | =
5\text{ cm} | x = 2+3 = 5\text{ m} | !
2\sqrt{2} | x=5=2\sqrt{2} | !
2\sqrt{2} | 3=2\sqrt{2} | !
2\sqrt{2} | x=\sqrt{8}=2\sqrt{2} | =
4\pi | A=\pi r^2=4\pi | =
x+1 | y=5=x+1 | !
y=2x+3 | y=2(x+1)+1=2x+3 | =
x=1,y=2 | x=1=1,y=1+1=2 | =
x=1,y=2 | x=1=1,y=1+2=2 | !
x \le 5 | 5 \geq x | =
x<5 | x>5 | !
# lists, sets, tuples
1,2 | 2,1 | =
1, 2 | 1 and 2 | =
1,2 | 1,3 | !
1,2 | 1,2,3 | !
\{1,2,3\} | \{3, 2, 1\} | =
\{1,2,3\} | {1,2,3} | =
\{1,2,3\} | 1,2,3 | =
\{1,2\} | (1,2) | !
\{5\} | 5 | =
(1,2) | ( 1 , 2 ) | =
(1,2) | \left(1, 2\right) | =
(1,2) | (2,1) | !
(1,2) | 1,2 | =
(1,2) | \{1,2\} | !
(\frac12, 3) | (0.5, 3) | =
(1,2,3) | (1,2,4) | !
(1,2,3) | [1,2,3] | =
x=1,x=2 | 1, 2 | =
1,2 | x = 2 \text{ or } x = 1 | =
x=1,y=2 | y=2,x=1 | =
x=1,y=2 | x=2,y=1 | !
\pm 3 | 3,-3 | =
3,-3 | \pm 3 | =
\sqrt{2},-\sqrt2 | -\sqrt{2}, \sqrt{2} | =
(1,2),(3,4) | (3,4),(1,2) | =
(1,2),(3,4) | (2,1),(3,4) | !
\emptyset | \{\} | =
\emptyset | \{0\} | !
\emptyset | \text{no solution} | =
\emptyset | none | =
\text{no solutions} | \varnothing | =
\emptyset | \text{all} | !
\emptyset | 0<1 | !
\emptyset | 1<0 | !
\emptyset | x<x+1 | !
\mathbb{R} | 0<1 | !
(0,1) | 0<1 | !
(-\infty,\infty) | x<x+1 | !
\{1,2\} | \{1,1,2\} | =
\{1,1,2\} | \{2,1\} | =
\{1,2\} | \{1,1\} | !
1,1,2 | \{1,2\} | !
1,1,2 | \{1,1,2\} | =
# intervals
[1,2] | [1, 2] | =
[1,2] | (1,2) | !
[1,2) | [1,2] | !
(-\infty,3] | \left(-\infty, 3\right] | =
(-\infty, 3) | x<3 | =
(-2,-1)\cup(1,2) | x^4-5x^2+4<0 | =
(1,2)\cup(3,4) | (x-1)(x-2)(x-3)(x-4)<0 | =
(1,2) | 1<x<2 | =
x\in[1,2] | [1,2] | =
(-\infty,1)\cup(2,\infty) | (2,\infty) \cup (-\infty,1) | =
(-\infty,1)\cup(2,\infty) | (-\infty,1]\cup(2,\infty) | !
[0,\frac12] | [0, 0.5] | =
\mathbb{R} | (-\infty,\infty) | =
# matrices
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\ 2\end{bmatrix} | =
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix} | =
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\4&3\end{pmatrix} | !
\begin{pmatrix} 1/2 \\ 3 \end{pmatrix} | \begin{pmatrix} 0.5 \\ 3 \end{pmatrix} | =
(1,2) | \begin{pmatrix}1\\2\end{pmatrix} | =
\begin{pmatrix}1\\2\end{pmatrix} | (1, 2) | =
\begin{pmatrix}1\\2\end{pmatrix} | (2, 1) | !
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix} | !
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \left[\begin{array}{cc}1&2\\3&4\end{array}\right] | =
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \left(\begin{array}{rr}1 & 2 \\ 3 & 4 \end{array}\right) | =
\left[\begin{array}{cc}1&2\\3&4\end{array}\right] | \begin{bmatrix}1&2\\3&4\end{bmatrix} | =
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \left[\begin{array}{cc}1&2\\4&3\end{array}\right] | !
(1,2) | \left(\begin{array}{c}1\\2\end{array}\right) | =
# words and choices
12:30 | 12{:}30 | =
\text{does not exist} | DNE | =
\text{does not exist} | \text{none} | !
5 | \textbf{(A) }5 | =
5 | \textbf{(A)}\ 6 | !
5 | (A) 5 | =
\text{(B) } 5 | B | =
\text{(B) } 5 | \textbf{(B)} | =
\text{(B) } 5 | 5 | =
\text{(B) } 5 | \text{(B) }5 | =
\text{(B) } 5 | \text{(A) }5 | !
\text{(B) } 5 | C | !
\text{(B) } 5 | \text{(B) }6 | !
B | \textbf{(B) }5 | =
B | \textbf{(A) }5 | !
b | \text{B} | !
b | \text{b} | =
x | \text{X} | !
\text{x} | X | =
10:30 a.m. | \text{10:30 AM} | =
10:30\text{ p.m.} | 10:30 am | !
B | (B) | =
\text{(B)} | B | =
B | \textbf{(B)} | =
B | B. | =
B | C | !
\text{Evelyn} | Evelyn | =
\text{Evelyn} | evelyn | =
\text{east} | \text{seat} | !
east | seat | !
\text{Monday} | \text{ monday} | =
\text{yes} | No | !
\text{yes} | Yes | =
\text{ice cream} | icecream | =
\text{ice cream} | \text{scream} | !
\text{St. Mary} | St Mary | =
\text{July 4} | 4 | !
AB | \text{AB} | =
# names
x=1, y=2 | (1,2) | =
x=1, y=2 | (2,1) | !
x=1, y=2 | 1,2 | =
x=1, y=2 | 2,1 | !
x=1, y=2 | y=2, x=1 | =
x=1, y=2 | y=1, x=2 | !
x=1, y=2 | x=2, y=1 | !
x=1, y=2 | \{1,2\} | !
x=1, y=2 | x=1, 2 | =
x=1, y=2 | 1, x=2 | !
x=1, y=2 | 1 \text{ and } 2 | =
x=1, y=2 | (1,2,3) | !
a=3,b=4 | 3,4 | =
a=3,b=4 | 4,3 | !
a=3,b=4 | a=4,b=3 | !
a=3,b=4 | b=4,a=3 | =
a=3,b=4 | c=3,d=4 | !
x=1,x=2 | 2,1 | =
x=1,x=2 | x=2,x=1 | =
3,4 | b=4,a=3 | =
(1,2) | x=1,y=2 | =
(1,2) | y=2,x=1 | =
(1,2) | x=2,y=1 | !
(1,2,3) | x=1,z=3,y=2 | =
# letters
ABC | ABC | =
ABC | \text{ABC} | =
ABC | A B C | =
ABC | CBA | !
ABC | BAC | !
ABC | DEF | !
ABC | \text{CBA} | !
ABC | A,B,C | !
AB | BA | !
AB, CD | CD, AB | =
AB, CD | BA, DC | !
(AB, CD) | (AB, DC) | !
\text{ABC} | CBA | !
cat | act | !
cat | CAT | =
xy | yx | =
abc | cab | =
lwh | hwl | =
xy | xz | !
2ab | 2ba | =
\angle ABC | \angle CBA | =
\angle ABC | \angle BAC | !
\triangle ABC | \triangle BCA | =
\triangle ABC | \triangle DEF | !
\overline{AB} | \overline{BA} | =
\overrightarrow{AB} | \overrightarrow{BA} | !
# money
\$5 | 5 | =
\$5 | \$5.00 | =
\$5 | 5 dollars | =
\$5 | 5\text{ cents} | !
\$5 | 500\text{ cents} | =
\$5 | 5¢ | !
\$5 | €5 | !
$5 | 5 cents | !
50\text{ cents} | \$0.50 | =
50\text{ cents} | \$50 | !
5 | \$5 | =
\$5 | \$5 per hour | =
\$5 per hour | 5 dollars per hour | =
\$5 per hour | 5 | =
£5 | 5 pounds | =
5000 | \$5K | =
\$5\text{ million} | \$5M | =
\$5, \$6 | 6, 5 | =
\$5 | \$6 | !
# angles and temperatures
30^\circ | 30 | =
30^\circ | 30\text{ degrees} | =
30^\circ | 30\text{ radians} | !
30^\circ | 30 radians | !
30^\circ | 30\text{ rad} | !
30^\circ | \frac{\pi}{6} | =
30^\circ | \frac{\pi}{6}\text{ radians} | =
30^\circ | \frac{\pi}{3} | !
30^\circ | \arcsin(\frac12)+0\pi | !
30^\circ | \frac{\pi}{3}-\frac{\pi}{6} | !
30^\circ | \pi/6 | =
30^\circ | \frac{1}{6}\pi | =
-30^\circ | -\frac{\pi}{6} | =
150^\circ | 5*pi/6 | =
30^\circ | \frac\pi6 | =
150^\circ | \frac{5}{6}\cdot\pi | =
150^\circ | \frac{5}{6}\times\pi | =
180^\circ | \pi | =
\frac{\pi}{6} | 30^\circ | =
\frac{\pi}{6} | 30 | !
\frac{\pi}{6} | 60° | !
30^\circ, 60^\circ | 60°, 30° | =
25^\circ C | 25 | =
25^\circ\text{C} | 25°C | =
25^\circ\text{C} | 25 degrees Celsius | =
25^\circ\text{C} | 25^\circ | =
25^\circ\text{C} | 25^\circ\text{F} | !
# words that change a number
5 | 5 dozen | !
60 | 5 dozen | =
5\text{ dozen} | 60 | =
5 | 5\text{ K} | !
5 | 5 K | !
5 | 5K | !
5000 | 5\text{ K} | =
5000 | 5K | =
300\text{ K} | 300 | =
300\text{ K} | 300 kelvin | =
300\text{ K} | 300 K | =
300 | 300 kelvin | =
5 | 5 tens | !
5m | 5 m | =
# bounds
5 | \text{at most }5 | !
5 | \text{at most 5} | !
5 | at most 5 | !
5 | \text{less than } 5 | !
5 | 5\text{ at most} | !
5 | at least 5 | !
5 | over 5 | !
5 | almost 5 | !
5 | @The answer is at most 5. | !
5 | @The answer is less than 5. | !
5 | @The answer is more than 5 apples. | !
5 | @So she has no more than 5. | !
5 | about 5 | =
5 | \text{approximately } 5 | =
5 | exactly 5 | =
\text{at most }5 | at most 5 | =
\text{at most }5 | 5 | !
x \leq 5 | at most 5 | =
x \leq 5 | at least 5 | !
x < 5 | less than 5 | =
5 | n<=5 | !
5 | n>=5 | !
5 | n!=5 | !
5 | n != 5 | !
5 | x\not=5 | !
5 | x≠5 | !
120 | 5!=120 | =
(-\infty,5] | x<=5 | =
[5,\infty) | x >= 5 | =
(-\infty,5] | x>=5 | !
x \neq 5 | x != 5 | =
# percents
5\% | 5 | =
5\% | 5 percent | =
5\% | 0.05 | =
5\% | 5 percent per year | =
5\% | \$5 | !
5\% | 5 cents | !
5\% | 5^\circ | !
50\% | 50 cm | !
20\% | 20 minutes | !
# neighbors of a number in running text
5 | @I get 5 dozen. | !
60 | @I get 5 dozen. | =
5 | @They sold 5 thousand. | !
5000 | @They sold 5 thousand. | =
5 | @The total is $5$ million | !
5 | @so we need 5 or more. | !
5 | @it takes 5 at most | !
5 | @It is −5 | !
-5 | @It is −5 | =
5 | @It is minus 5 | !
-5 | @It is negative 5 | =
5 | @It is half of 5 | !
\$5 | @It costs 5 cents. | !
30^\circ | @The angle is 30 radians. | !
3 | @It is \frac{1}{3} | !
3 | @It is \sqrt{3} | !
3 | @It is 5^3 | !
345 | @It is 12 345. | !
2 | @The ratio is 1 to 2. | !
5 | @So 2 + 3 = 5. | =
5 | @It is **5**. | =
# inverse functions
2 | x^{-1}=2 | !
2 | a^{-1}=2 | !
2 | f^{-1}(3)=2 | =
f^{-1}(x)=x | g^{-1}(x)=x | !
f^{-1}(x)=\frac{x-1}{2} | f(x)=\frac{x-1}{2} | !
f^{-1}(x)=\frac{x-1}{2} | f^{-1}(x)=\frac{x+1}{2} | !
f^{-1}(x)=\frac{x-1}{2} | \frac{x-1}{2} | =
\frac{x-1}{2} | f^{-1}(x)=\frac{x-1}{2} | =
# equations to be solved
5 | 2x=5 | !
5 | -x=5 | !
5 | x^2=5 | !
5 | 1/x=5 | !
2 | \log x=2 | !
5 | x=5 | =
5 | f(2)=5 | =
5 | m+n=5 | =
n^2-1 | 7n=n^2-1 | !
n^2-1 | (n+5)^2=n^2-1 | !
a+b | a-b=a+b | !
\pi r^2 | 2\pi r=\pi r^2 | !
a+b | m+n=a+b | =
x^2-1 | (x-1)(x+1)=x^2-1 | =
x^2-1 | x^2=x^2-1 | !
2x+3 | y=2(x+1)+2=2x+3 | !
2x+3 | y=2(x+1)+1=2x+3 | =
2x | \frac{d}{dx}(x^2)=2x | =
2x | f'(x)=2x | =
\frac{n(n+1)}{2} | \sum_{k=1}^n k=\frac{n(n+1)}{2} | =
5 | 2m=5 | !
5 | e^t=5 | !
0 | a^2-5a=0 | !
5 | \ln n=5 | !
5 | \log_2 n=5 | !
\frac12 | \cos A=\frac12 | =
\frac12 | \sin\theta=\frac12 | =
4\pi | \pi r^2=4\pi | !
25 | A=s^2=25 | =
5 | a+b=5 | =
10 | n=\frac{2n}{2}=10 | =
3 | \frac{dy}{dx}=3 | =
i | e^{i\pi/2}=i | =
5 | |z|=5 | =
5 | 2AB=5 | =
0 | y^2-5y=0 | !
30 | n(n+1)=30 | !
5 | f(f(2))=5 | =
0 | \sin(x)=0 | !
5 | P(3)=5 | =
5 | x_1+x_2=5 | =
20 | the area =4\cdot 5=20 | =
5 | \text{Area of it} = s^2 = 5 | =
1,2 | x=3-2=1, y=1+1=2 | =
5 | \log x=5 | !
5 | log x=5 | !
5 | \int_0^1 x dx=5 | =
2x+1 | x^2+x+1=2x+1 | !
2t | v(t)=\frac{d}{dt}t^2=2t | =
0 | x(x-5)=0 | !
# roundings
2\sqrt{3} | 2\sqrt{3}\approx 3.46 | =
2\sqrt{3} | x = 2\sqrt{3}\approx 3.46 | =
2\sqrt{3} | \sqrt{12} = 2\sqrt{3} \approx 3.464 | =
2\sqrt{3} | 2\sqrt{3}\approx 5 | !
2\sqrt{3} | 3\sqrt{2}\approx 4.24 | !
2\sqrt{3} | 3.46 | !
2\sqrt{3} | x \approx 3.46 | !
3.46 | 2\sqrt{3}\approx 3.46 | =
\pi | \pi \approx 3.14 | =
\frac{1}{3} | \frac13 \approx 0.33 | =
\frac{1}{3} | \frac13 \approx 0.4 | !
2\sqrt{3}\text{ cm} | 2\sqrt{3}\approx 3.46\text{ cm} | =
# sets
\{x \mid x<3\} | \{x \mid x<3\} | =
\{x \mid x<3\} | x<3 | =
x<3 | \{x \mid x<3\} | =
x<3 | \{x : x > 3\} | !
(-\infty,3) | \{x \mid x<3\} | =
(-\infty,3) | \{x \in \mathbb{R} \mid x<3\} | =
(-\infty,3) | \{x \mid x \leq 3\} | !
(-\infty,3) | \{x \in \mathbb{Z} \mid x<3\} | !
\mathbb{R} | \text{all real numbers} | =
\mathbb{R} | all reals | =
\mathbb{R} | ℝ | =
\mathbb R | x \in \mathbb{R} | =
\text{all real numbers} | (-\infty,\infty) | =
(-\infty,\infty) | \text{all real numbers} | =
\mathbb{R} | \text{all integers} | !
# ratios and times
1:2 | 1 to 2 | =
1:2 | 1\text{ to }2 | =
1:2 | 2 to 1 | !
1:2 | @The answer is 1 to 2. | =
1:2:3 | 1 to 2 to 3 | =
1:2 | 2:4 | =
8:30 a.m. | 8:30 a.m. | =
8:30 a.m. | @The answer is 8:30 a.m. | =
8:30 a.m. | @So the train arrives at 8:30 a.m. | =
8:30\text{ a.m.} | 8:30 AM | =
8:30\text{ a.m.} | 08:30 am | =
8:30 a.m. | 8:30 | =
8:30 | 8:30 a.m. | =
8:30 a.m. | 8:30 p.m. | !
8:30 | 4:15 | !
5 p.m. | 5:00 p.m. | =
# spaces
12345 | 12\;345 | =
12345 | 12\,345 | =
12345 | 12 345 | =
12345 | 12\ 345 | =
12345 | 12~345 | =
12345 | 1234\,5 | !
12345 | 1 2345 | !
1234567 | 1\,234\,567 | =
12 | 1\,2 | !
12 | 1 2 | !
72 | 7 2 | !
72 | @#### 7 2 | !
14 | 7 2 | !
x+72 | x+7 2 | !
3.141592 | 3.141\,592 | =
\log_2 3 | \log_2\,3 | =
\log_2 3 | \log_{23} | !
# tags
5 | @<answer>5</answer> | =
5 | @<answer> 5 </answer> since 2 + 3 | =
5 | @It is 7. <answer>The answer is $5$.</answer> | =
5 | @<think>6</think><answer>5 | =
5 | @<answer>6</answer> | !
5 | @<answer>6</answer> no: \boxed{5} | =
5 | @<answer>\boxed{5}</answer> | =
\text{Monday} | @<answer>Monday</answer> | =
\mathbb{R} | @<answer>all real numbers</answer> | =
5 | @<answer></answer> 5 | =
5 | @<think><answer>5</answer> | !
# huge numbers
\log_2 3 | 1e400 | !
\log_2 3 | 10^{999} | !
\log_2 3 | 10^{9} | !
\log_2 3 | \frac{\ln 3}{\ln 2} | =
\log_2 3 | 1.58496250072115618145373894394781650875981440769248 | !
\log_2 x | 10^{999} | !
\log_2 x | \frac{\ln x}{\ln 2} | =
x | 10^{9}\log 2 + x | !
\sqrt{2} | 10^{999} | !
5 | 5\approx 1e400 | !
5 | 5\approx 1e-400 | !
\sqrt2 | 10^{361}\approx 5 | !
10^{100}+1 | 10^{100} | !
10^{100}+1 | 1+10^{100} | =
# boxes joined in LaTeX
6 | @$\boxed{5} \text{ or } \boxed{6}$ | !
5,6 | @$\boxed{5} \text{ or } \boxed{6}$ | =
6 | @$\boxed{5} \textrm{ or } \boxed{6}$ | !
6 | @$\boxed{5} \mbox{ or } \boxed{6}$ | !
6 | @$\boxed{5} \quad \boxed{6}$ | !
6 | @$\boxed{5}\ \boxed{6}$ | !
6 | @$\boxed{5}\;\boxed{6}$ | !
6 | @$\boxed{5} \lor \boxed{6}$ | !
6 | @$\boxed{5} & \boxed{6}$ | !
6 | @\(\boxed{5}\) or \(\boxed{6}\) | !
6 | @\[\boxed{5}\] or \[\boxed{6}\] | !
5,6 | @\[\boxed{5}\] or \[\boxed{6}\] | =
6 | @$\boxed{5}$ **or** $\boxed{6}$ | !
6 | @$\boxed{5}$ or $\boxed{6}$ | !
5,6 | @$$\boxed{5}$$ and $$\boxed{6}$$ | =
5,6 | @$\boxed{5}$; $\boxed{6}$ | =
5,6 | @$\boxed{5}$, $\boxed{6}$ | =
# letters and words that are no units
3 | 3\mathrm{i} | !
3 | 3\mathrm{e} | !
3 | 3\text{x} | !
3 | 3\mathbf{x} | !
3 | 3\mathrm{e}^2 | !
3 | 3\mathrm{i}^2 | !
2e | 2\mathrm{e} | =
3x | 3\mathbf{x} | =
3i | 3\mathrm{i} | =
3 | 3\text{ quarters} | !
3 | 3 score | !
3 | 3\text{ gross} | !
3 | 3 pairs | !
3 | 3 lakh | !
300000 | 3 lakh | =
3 | 3 bn | !
3 | 3\text{ mn} | !
3 | 3 base two | !
3 | 3 negative | !
3 | 3 is wrong | !
3 | 3\text{ is wrong} | !
3 | 3 crore | !
3 | 3\mathrm{m} | =
3 | 3\,\mathrm{kg} | =
3m | 3\mathrm{m} | =
# and, or
x<-2 \text{ or } x>2 | x<-2 \text{ and } x>2 | !
x<-2 \text{ or } x>2 | x<-2 \text{ or } x>2 | =
x<-2 \text{ or } x>2 | x>2\text{ or }x<-2 | =
x>1 and y>2 | x>1 or y>2 | !
x>1 or y>2 | x>1 and y>2 | !
x>1 and y>2 | y>2 and x>1 | =
both A and B | A or B | !
both A and B | A and B | =
A and B | A or B | !
x>1 and x<3 | 1<x<3 | =
x>1 and x<3 | x>1 or x<3 | !
# degrees in functions
\sin 1 | \sin 1^\circ | !
\sin 1^\circ | \sin 1 | !
\tan 75^\circ | 2+\sqrt3 | =
2+\sqrt3 | \tan 75^\circ | =
4\sin 20^\circ | 4\cos 70^\circ | =
4\sin 20^\circ | 4\cos 20^\circ | !
# a box that is cut off
5 | @\boxed{5} wait \boxed{7 | !
# plus-minus
\frac{1\pm\sqrt5}{2} | \frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2} | =
\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2} | \frac{1\pm\sqrt5}{2} | =
\frac12\pm\frac{\sqrt5}{2} | \frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2} | =
\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2} | \frac12\pm\frac{\sqrt5}{2} | =
\sqrt{2\pm\sqrt3} | \sqrt{2+\sqrt3},\sqrt{2-\sqrt3} | =
(\pm1,2) | (1,2),(-1,2) | =
(1,2),(-1,2) | (\pm1,2) | =
2\pm\sqrt3 | 2+\sqrt3, 2-\sqrt3 | =
2\pm\sqrt3 | 2+\sqrt3 | !
\frac{1\pm\sqrt5}{2} | \frac{1\pm\sqrt5}{2} | =
\frac{1\pm\sqrt5}{2} | \frac{1\pm\sqrt3}{2} | !
x = \pm 3 | x=3 \text{ or } x=-3 | =
\pm 2 \mp \sqrt3 | 2-\sqrt3, -2+\sqrt3 | =
\{\pm1,\pm2\} | -2,-1,1,2 | =
# complex numbers
2-2i | 2(1-i) | =
\frac i2 | 0.5i | =
3+4i | (2+i)^2 | =
14-i | 14-1i | =
-\frac15-\frac45i | \frac{-1-4i}{5} | =
3-6i | 3(1-2i) | =
3-6i | 3(1+2i) | !
2-2i | 2-2j | !
3+4i | 5 | !
i\sqrt3 | \sqrt{-3} | =
-1 | i^2 | !
# upright letters and functions
1-\frac{1}{\mathrm e} | 1-\frac1e | =
\ln 2 | \mathrm{ln}\,2 | =
\sin x | \operatorname{sin} x | =
3+4i | 3+4\mathrm i | =
e^2 | \exp(2) | =
# nested roots
\frac{\sqrt{7+\sqrt{13}}}{\sqrt[4]{5}+\sqrt3} | \frac{\sqrt{\sqrt{13}+7}}{\sqrt3+\sqrt[4]{5}} | =
\frac{\sqrt{7+\sqrt{13}}}{\sqrt[4]{5}+\sqrt3} | \frac{\sqrt{7+\sqrt{13}}}{\sqrt[4]{5}+\sqrt2} | !
# lists with and
1,2,3 | 1, 2, \text{ and } 3 | =
1, 2, \text{ and } 3 | 1,2,3 | =
1,2 | 1 \mathrm{and} 2 | =
1,2 | 1 \mbox{ and } 2 | =
1,2 | 1 \& 2 | =
1,2,3 | 1, 2, \mathrm{and}\ 3 | =
# choices with text
E | E: text | =
E | E. Paris | =
E | (E) Paris | =
E | E. 12 | =
E | \text{Option E} | =
E | @The correct option is E. | =
E. Paris | E | =
E | D. Paris | !
E | C) 42 cm | !
C | C) 42 cm | =
E | E. Paris or D. Rome | !
E | (A) or (E) | !
E | \text{Option D} | !
Paris | E. Paris | =
# fonts and colors
17 | \boldsymbol{17} | =
17 | \bm{17} | =
17 | \mathit{17} | =
17 | \mathsf{17} | =
17 | \underline{17} | =
17 | \textcolor{blue}{17} | =
17 | \color{red}{17} | =
17 | {\bf 17} | =
17 | \Large 17 | =
17 | \emph{17} | =
\frac34 | \mathbf{\frac34} | =
2\sqrt3 | \mathbf{2\sqrt3} | =
\frac34 | \text{\frac34} | =
17 | \mathbf{18} | !
# unions and conditions
(-\infty,-2)\cup(2,\infty) | x<-2 \text{ or } x>2 | =
x<-2 \text{ or } x>2 | (-\infty,-2)\cup(2,\infty) | =
(-\infty,-2)\cup(2,\infty) | x<-2 \text{ and } x>2 | !
x<-2 or x>2 | |x|>2 | =
|x|>2 | (-\infty,-2)\cup(2,\infty) | =
[1,3] | x \ge 1 \text{ and } x \le 3 | =
[1,3] | x \ge 1 \text{ or } x \le 3 | !
[1,3] | x > 1 \text{ and } x \le 3 | !
(-\infty,-2)\cup(2,\infty) | x<-2, x>2 | =
x\ne 3 | (-\infty,3)\cup(3,\infty) | =
\mathbb{R}\setminus\{3\} | x \neq 3 | =
x<-2 \text{ or } x>2 | y<-2 \text{ or } y>2 | !
x<\sqrt2 | (-\infty,\sqrt2) | =
# commas within numbers
32349 | 32,\! 349 | =
11111100 | 11,\! 111,\! 100 | =
1000 | 1,\ 000 | =
1000 | 1{,}\,000 | =
1,200 | 1200 | =
1,20 | 1, 20 | =
# roots and logarithms of variables
\sqrt{1/n} | \frac{1}{\sqrt n} | =
\sqrt{g/l} | \frac{\sqrt g}{\sqrt l} | =
\sqrt{ab} | \sqrt a\sqrt b | =
\log(ab) | \log a+\log b | =
\ln\frac ab | \ln a-\ln b | =
\sqrt{x^2} | x | !
x | \sqrt{x^2} | !
|x| | \sqrt{x^2} | =
\ln|x| | \ln x | !
# qualifiers
f(x)=2x | f(x)=2x \text{ for all } x | =
f(x)=2x | f(x)=2x\ \forall x | =
f(x)=2x | f(x)=2x \text{ where } n\ge1 | =
\{1,2,3\} | \{1,2,3\}\text{ only} | =
f(x)=2x | f(x)=3x \text{ for all } x | !
f(x)=2x | f(x)=2x \text{ for all } x \text{ but } 3 | !
5 | 5 only | =
5 | 5 only if x=3 | !
5 | 5 where 5 is not the answer | !
5 | @They sold 5 lakh. | !
5 | @They sold 5 pairs. | !
500000 | @They sold 5 lakh. | =
# ratios of three
1:2:3 | 2:4:6 | =
1:2:3 | 2:4:7 | !
1:2:3 | 3:2:1 | !
# plain text
\frac{\pi}{2} | pi/2 | =
-2\pi | -2*pi | =
x^2+1 | x**2+1 | =
\ln 2 | log(2) | =
e^{16}-1 | -1 + exp(16) | =
\infty | infinity | =
14-i | 14.0 + -1.0i | =
\frac12 | ½ | =
\sqrt2 | sqrt(2) | =
\frac{x+1}{2} | (x+1)/2 | =
2x | 2*x | =
\frac\pi6 | π/6 | =
# other notations
(1,2,3) | \langle1,2,3\rangle | =
\langle1,2,3\rangle | (1,2,3) | =
3\text{ hours and }20\text{ minutes} | 3 hours and 20 minutes | =
3 hours and 20 minutes | 3 hours 20 minutes | =
3 hours and 20 minutes | 200 minutes | =
3 hours and 20 minutes | 3 hours and 30 minutes | !
200 | 3 hours and 20 minutes | =
3 | 3 hours and 20 minutes | !
x\equiv3\pmod7 | 3\pmod7 | =
3\pmod7 | x\equiv3\pmod7 | =
x\equiv3\pmod7 | x \equiv 3 \pmod{7} | =
x\equiv3\pmod7 | 3\pmod 8 | !
x\equiv3\pmod7 | 4\pmod 7 | !
\log_{10} 5 | \lg 5 | =
\binom{n}{2} | \binom n2 | =
\frac{n(n-1)}{2} | \binom n2 | =
\mathbb Z | \text{all integers} | =
\text{all integers} | \mathbb{Z} | =
\mathbb R^+ | (0,\infty) | =
\mathbb{R}^+ | \text{all positive real numbers} | =
\frac13 | 0.\dot3 | =
0.\dot3 | \frac13 | =
4\sqrt2 | 4\sqrt(2) | =
y=\frac12x | x=2y | =
y=\frac12x | x=3y | !
p=5,q=2;p=7,q=2 | (5,2),(7,2) | =
p=5,q=2;p=7,q=2 | (5,2),(7,3) | !
p=5,q=2;p=7,q=2 | (7,2),(5,2) | =
# formulas and answers of many kinds
5 | 5 or more | !
5 | 5 \text{ or } 6 | !
x>2 | x\ge 2 | !
x>2 | x<2 | !
2x+3 | 2x+4 | !
x^2+2x+1 | (x+1)^3 | !
\frac{1}{2x} | \frac{x}{2} | !
\sqrt{2}+\sqrt{3} | \sqrt{5} | !
\frac{\pi}{4} | \frac{\pi}{5} | !
(1,2) | [1,2) | !
(1,2)\cup(3,4) | (1,2)\cup(3,4] | !
(1,2)\cup(3,4) | (1,2) | !
\{1,2\} | \{1,3\} | !
\sin x | \cos x | !
\sin^{-1} x | \arcsin x | =
\sin^{-1} x | \frac{1}{\sin x} | !
2^{10}-1 | 1024-1 | =
1023 | 2^{10}-1 | !
x=2y | y=2x | !
3x+4y=12 | y=3-\frac{3}{4}x | =
3x+4y=12 | 6x+8y=24 | =
3x+4y=12 | 3x+4y=13 | !
y = 3x - 2 | 3x - y - 2 = 0 | =
x^2+y^2=4 | y^2 = 4-x^2 | =
x^2+y^2=4 | x^2+y^2=2 | !
\frac{3}{4} | 0.75 | =
\frac{3}{4}, \frac{5}{6} | \frac56, 0.75 | =
e | 2.71828 | !
\pi | 3.14159265358979 | !
\frac{x+2}{7} | \frac{2+x}{7} | =
\frac{9}{7} | 1\frac27 | =
i | \sqrt{-1} | =
-i | i | !
5 | |5| | !
|-5| | 5 | =
n! | n(n-1)! | =
\binom{n}{k} | \frac{n!}{k!(n-k)!} | =
\binom{n}{k} | \binom{n}{k+1} | !
2^{n+1} | 2\cdot 2^n | =
2^n | n^2 | !
(-1)^n | (-1)^{n+1} | !
(-1)^n | (-1)^{n+2} | =
\log_2 x | \frac{\log x}{\log 2} | =
\log_{10} x | \log x | =
a+b | b+a | =
a+b | a+c | !
A+a | a+A | =
A+a | 2a | !
\cot x | \frac{\cos x}{\sin x} | =
1+\tan^2 x | \sec^2 x | =
\sqrt{x+1} | \sqrt{1+x} | =
x\sqrt{x} | x^{3/2} | =
\sqrt[3]{x} | x^{1/3} | =
\frac{1}{x} | x^{-1} | =
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} | =
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix} | !
\begin{pmatrix} 1 & x+1 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 1+x \\ 3 & 4 \end{pmatrix} | =
\begin{pmatrix} 1 & 2 & 3\end{pmatrix} | (1,2,3) | !
[-1,\infty) | x \geq -1 | =
(0,\infty) | x>0 | =
(-\infty,5) | (x-1)^2(x-5)<0 | !
(0, 1) | x^2 < x | =
[2,\infty) | \sqrt{x-2} \ge 0 | !
x > 3 \text{ and } x<1 | \emptyset | !
k < 2 | x<2 | !
(1,2,3) | 1,2,3 | =
(1,2,3) | 3,2,1 | !
2,3 | 2 | !
2 | 2,2 | !
\{2,2\} | 2 | =
\frac{-1\pm\sqrt{3}}{2} | \frac{-1+\sqrt3}{2} | !
12 | 12 \mod 13 | !
7:30 | 7:30 am | =
2:3 | \frac{2}{3} | =
2:3 | \frac{3}{2} | !
1:2:3 | \frac{1}{2} | !
x-3 | 3-x | !
\text{Alice} | Bob | !
\text{Alice} | \text{Alice or Bob} | !
\text{Alice} | Alice and Bob | !
\text{red} | \text{not red} | !
10 | 10 \text{ but not } 11 | !
10 | \text{not } 10 | !
10 | 10?  | !
10 | 10, 11 | !
10 | 11 (not 10) | !
10 | \text{either } 10 \text{ or } 11 | !
3 | 3 \text{ (mod 5)} | !
3 | 3 \text{ mod } 5 | !
8 | 8i | !
8 | 8e | !
8 | 8x | !
8 | 8\pi | !
8 | 8^\circ\text{C} | =
8 | 8\text{th} | =
8 | \overline{8} | !
8 | 8\text{ to }9 | !
8 | 8-9 | !
8 | 8/1 | =
8 | 16/2 | =
8 | \frac{16}{2} | =
8 | \sim 8 | !
8 | 8+0 | !
8 | 8\cdot1 | !
8 | 08 | =
8 | 8.0000000001 | =
8 | 7.9999 | !
1000 | 1.000 | !
1,000 | 1000 | =
1000000 | 10^6 | =
1.5 | 1,5 | !
4x^3 | 4x^{3} | =
\frac{x}{y} | x/y | =
\frac{1}{2}x | x/2 | =
\frac{a}{b+c} | a/(b+c) | =
\frac{a}{b+c} | a/b+c | !
2xy | 2yx | =
(x+1)(x-2) | (x-2)(x+1) | =
x^2-x-2 | (x+1)(x-2) | =
\cos 2x | 2\cos^2 x - 1 | =
\frac{\sqrt{3}}{3} | \frac{1}{\sqrt3} | =
3\sqrt{2} | \sqrt{18} | =
3\sqrt{2} | 3\sqrt{3} | !
\frac{2\sqrt{5}}{5} | \frac{2}{\sqrt5} | =
\arctan\frac{1}{2} | \tan^{-1}(1/2) | =
e^{i\pi/3} | \frac12+\frac{\sqrt3}{2}i | =
2e^{i\pi/4} | \sqrt2+\sqrt2 i | =
2\text{cis}\frac{\pi}{4} | 2\text{cis}\frac{\pi}{4} | =
\text{A, B, C} | A, B, C | =
\text{A and C} | A,C | =
A, C | (A),(C) | =
A | A, C | !
D | \text{D) All of the above} | =
\frac{n(n+1)}{2} | \sum_{k=1}^n k | !
x=\sqrt2 | 3x=3\sqrt2 | !
x=\sqrt2 | x=\sqrt2 | =
x=\sqrt2 | \sqrt2 | =
x=\sqrt2 | x=\frac{2}{\sqrt2} | =
x=\sqrt2 | y=\sqrt2 | !
x=\frac{\pi}{4} | 4x=\pi | !
y=2x | y=2z | !
f(x)=2x | f(x)=x\cdot 2 | =
f(x)=2x | g(x)=2x | !
x<3 | 2x+1<7 | =
5 | \text{five} | !
\frac{5}{9}(F-32) | \frac{5F-160}{9} | =
(x-3)^2+(y+1)^2=25 | (y+1)^2+(x-3)^2=5^2 | =
(x-3)^2+(y+1)^2=25 | (x-3)^2+(y+1)^2=5 | !
\frac{(x-2)^2}{9}+\frac{y^2}{4}=1 | 4(x-2)^2+9y^2=36 | =
a_n=2n+1 | a_n=1+2n | =
a_n = 2^n | a_n = 2^{n-1} | !
r=2\cos\theta | 2\cos\theta | =
S=\{1,2\} | \{2,1\} | =
(a,b)=(1,2) | (1,2) | =
x=1+2t, y=3-t | (1+2t, 3-t) | =
\frac{1}{2}\ln 5 | \ln\sqrt5 | =
\log_3 5 | \frac{\ln5}{\ln3} | =
6+3\sqrt3 | 3(2+\sqrt3) | =
\sqrt{6}-\sqrt{2} | \sqrt2(\sqrt3-1) | =
\frac{3+\sqrt{5}}{2} | \left(\frac{1+\sqrt5}{2}\right)^2 | =
0.1\overline{6} | \frac16 | =
-\frac{3}{2} | \frac{-3}{2} | =
-\frac{3}{2} | -1\frac12 | =
\frac{1}{2}, -\frac{1}{2} | \pm\frac12 | =
2 \pm \sqrt{3} | 2 \mp \sqrt{3} | =
x=\frac{-1\pm\sqrt{13}}{6} | \frac{-1+\sqrt{13}}{6}, \frac{-1-\sqrt{13}}{6} | =
\{-2, 0, 2\} | 0, \pm 2 | =
[0,3)\cup(3,\infty) | x\ge 0, x\ne 3 | =
1 < x \leq 2 | (1,2] | =
1 < x \leq 2 | 2 \ge x > 1 | =
x \in (1,2] | 1<x\le2 | =
x \le -1 \text{ or } x \ge 3 | (-\infty,-1]\cup[3,\infty) | =
|x-1|\ge 2 | (-\infty,-1]\cup[3,\infty) | =
|x - 1| < 2 | -1 < x < 3 | =
\$32{,}348 | 32348 | =
\$2.50 | 2.5 | =
15\text{ mph} | 15 | =
5.4 \text{ cents} | 5.4 | =
3 \text{ hours} | 3 | =
45\text{ students} | 45 | =
45\% | 0.45 | =
\text{Thursday} | thursday | =
\text{(C)} | C | =
\text{(C)} | \text{C} | =
C | \text{(D)} | !
\text{June 20} | June 20 | =
1 \frac{4}{5} | \frac{9}{5} | =
\frac{9}{5} | 1.8 | =
x^3+3x-6 | -6+3x+x^3 | =
(3,\frac{\pi}{2}) | (3,\pi/2) | =
\left( -\frac{5}{8}, 0, \frac32\right) | (-0.625,0,1.5) | =
1+2i | 2i+1 | =
\frac{1+i}{\sqrt2} | e^{i\pi/4} | =
\cos\theta + i\sin\theta | e^{i\theta} | =
3\mathbf{i}+4\mathbf{j} | 3i+4j | =
2k\pi | 2\pi k | =
\frac{\pi}{4}+k\pi, k\in\mathbb{Z} | \frac{\pi}{4}+k\pi | !
n(n+1) | n^2+n | =
k^2-3k+2 | (k-1)(k-2) | =
\tan^{-1}(3) | \arctan 3 | =
4! | 24 | =
24 | 4! | !
\binom{8}{3} | 56 | =
2^{2005}-2^{1003} | 2^{1003}(2^{1002}-1) | =
2^{2005}-2^{1003} | 2^{1003}(2^{1002}-2) | !
2^{2023}-1 | -1+2^{2023} | =
2^{2023}-1 | 2^{2023} | !
2^{2023}-1 | 2^{2023}-1-2^{-50} | !
\frac{3^{2023}-1}{2} | \frac12(3^{2023}-1) | =
\frac{3^{2023}-1}{2} | \frac12(3^{2023}+1) | !
(a,b)=(1,2) | (2,1) | !
(x,y)=(1,2) | x=1,y=2 | =
(1,2) | (x,y)=(1,2) | =
x\in(1,2) | (1,2) | =
x+y<3 | 2x+2y<6 | =
x+y<3 | -x-y>-3 | =
x+y<3 | x+y>3 | !
x+y<3 | x+y\le3 | !
(-\infty,5) | (x-1)^4(x-5)<0 | !
(-\infty,5) | (3x-1)^2(x-5)<0 | !
(-\infty,5) | (x^2-2)^2(x-5)<0 | !
(-\infty,5) | (x-1)^2(7x-1)^3(x-5)<0 | !
(-\infty,5) | (x-1)^2(x-5)\le0 | !
(-\infty,5] | (x-1)^2(x-5)\le0 | =
\{1\} | (x-1)^2\le0 | !
(-\sqrt2,\sqrt2) | x^2<2 | =
[-\sqrt2,\sqrt2] | x^2\le2 | =
(-\infty,-\sqrt2)\cup(\sqrt2,\infty) | x^2>2 | =
(0,2) | x^2-2x<0 | =
(-1,1) | |x|<1 | =
(-1,1) | |x|<-1 | !
(-1,1) | x^4<1 | =
(1,3) | (x-1)(x-3)<0 | =
\emptyset | x^2+1<0 | !
\mathbb{R} | x^2+1>0 | !
5 | 5M dollars | !
5 | 5\text{ M} | !
5 | 5\text{ in binary} | !
5 | 5 reciprocal | !
5 | 5 less | !
5 | 5 or none | !
5 | 5\text{ false} | !
5 | 5\,\mathrm{N} | =
5000000 | \$5M | =
5 | 5\text{ L} | =
(-\infty,3) | x+\sin(2\pi x)<3 | !
(-\infty,3) | x^{0.5}<3 | !
(-\infty,3) | \frac{x}{3}+\frac{1}{2}<\frac{3}{2} | =
2e+47 | 2 e + 47 | !
2\cdot 10^{47} | 2e+47 | =
e + \pi + \frac{47}{2} | \frac{2 e + 2 \pi + 47}{2} | =
2 e + 47 | 47+2 e | =
2 e + 47 | 2e+47 | !
2 | 2 e n y | !
2eny | 2 e n y | =
\arctan 3 | \operatorname{atan}(3) | =
\arctan 3 | atan(3) | =
-\arcsin(4x) | \arcsin(-4x) | =
\sqrt{x-30} | \sqrt{-30+x} | =
\frac{7}{2} | (3)\frac{1}{2} | !
\frac{3}{2}x | (3)\frac{1}{2}x | =
4x | x2^{3}\frac{1}{2} | =
\frac{7x}{2} | 3\frac12x | =
\log_{10} 2 | \log 2 | =
\log 2 | \log_{10} 2 | =
\log 2 | log(2) | =
\log 2 | \ln 2 | !
\ln 2 | \log 2 | !
\log x + 1 | \log(10x) | =
\ln x + 1 | log(e*x) | =
2 | log x=2 | !
# what has no value
\sqrt2 | \binom{\frac{2^{200}i^2}{2^{200}}}{3} | !
26 | 2^{-200}+(5+i^2)! | !
\sqrt2 | \ln^{-1}2 | !
\sqrt2 | \log^{-1}2 | !
\sqrt2 | \lg^{-1}2 | !
\sqrt2 | \exp^{-1}2 | !
\sqrt2 | \arcsin^{-1}0.5 | !
\sqrt2 | \sqrt[i]{-2} | !
(1,2) | (1,\lfloor i+2.5 \rfloor) | !
\tanh^{-1} x | \frac12\ln\frac{1+x}{1-x} | =
# numbers too large to be evaluated
(1,2) | 1<x<\sqrt[10^{-9}]{10} | !
x<1 | x<\sqrt[10^{-300}]{10} | !
5 | \sqrt[10^{-9}]{10}\approx 5 | !
(1,2) | (1,\sqrt[10^{-8}]{10})\cup(1,2) | !
(1,2) | (1,i^{-10^{9}i}) | !
h(h(g(i))) | h(h(g(i)))+0 | =
h(2x)+1 | 1+h(x+x) | =
# letters of functions that are variables
\frac{h(a+b)}{2} | \frac{(a+b)h}{2} | =
\frac{h(a+b)}{2} | \frac{(a+b)H}{2} | =
\frac{h(a+b)}{2} | \frac{(a+c)h}{2} | !
mg(h-R) | mgh-mgR | =
E=mg(h-R) | E=mgh-mgR | =
\sqrt{2g(h-y)} | \sqrt{2gh-2gy} | =
h(a+b)^2 | ha^2+2hab+hb^2 | =
h(a+b)^2 | h^2a^2+2h^2ab+h^2b^2 | !
f(2x) | 2f(x) | !
f(x+y) | f(x)+f(y) | !
f(x+1)-f(x) | -f(x)+f(1+x) | =
"""


def _verdicts():
  """Section → (gold, answer, whether it is right)."""
  sections = {}
  for line in VERDICTS.strip().splitlines():
    if line.startswith("# "):
      found = sections.setdefault(line[2:], [])
      continue
    left, _, verdict = line.rpartition(" | ")
    gold, _, answer = left.partition(" | ")
    found.append((gold, answer, verdict == "="))
  return sections


def _boxed(answer):
  return rf"So it is $\boxed{{{answer}}}$."


def _misjudged(gold, answer, right):
  """What is wrong with the grades of an answer; nothing if a careful human gives the same."""
  completions = [_boxed(answer), f"We get\n#### {answer}\n"]
  for completion in [answer[1:]] if answer.startswith("@") else completions:
    grade = mathematics(completion, {"answer": gold})
    if (grade.outcome is Outcome.CORRECT) is not right or grade.score != float(right):
      yield completion, grade
    if not grade.detail.startswith(grade.answer):
      yield "detail", grade
  for text in {gold, gold if answer.startswith("@") else answer}:
    normal = str(parse_answer(text))
    if str(parse_answer(normal)) != normal:
      yield "normal form", normal, str(parse_answer(normal))
    if mathematics(_boxed(text), {"answer": text}).outcome is not Outcome.CORRECT:
      yield "its own text", text


@pytest.mark.parametrize("section", _verdicts())
def test_a_careful_human_grader(section):
  verdicts = _verdicts()[section]
  assert verdicts
  assert {case: found for case in verdicts if (found := [*_misjudged(*case)])} == {}


@pytest.mark.parametrize(
  "amount",
  ["5", r"\frac{1}{2}", r"9\pi", r"2\sqrt{3}", r"\frac{\pi}{2}", "x+1", "x=5", "(1,2)", "1,2"],
)
def test_the_own_text_of_an_amount_with_a_unit_is_right(amount):
  units = r"""
    \text{~m} \text{~m}^2 \text{~cm}^{3} \text{~m/s}^2 ~\mathrm{~m}~/~\mathrm{s}^{2} \,\mathrm{cm}^2
    \text{~square~meters} \text{~cubic~inches} \text{~square~units} \text{~per~hour} \text{~m/s}
    \text{~miles~per~hour} \text{~dollars~per~hour} \text{~people~per~square~mile} \%
  """.split()
  for unit in units:
    text = amount + unit.replace("~", " ")
    normal = str(parse_answer(text))
    assert str(parse_answer(normal)) == normal
    assert mathematics(_boxed(text), {"answer": text}).outcome is Outcome.CORRECT, (text, normal)


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
def test_formulas_as_sympy_rewrites_them(seed):
  sympy = pytest.importorskip("sympy")
  draw = random.Random(seed)
  x, y = sympy.symbols("x y", real=True)
  leaves = [x, y, sympy.pi, sympy.E, sympy.sqrt(3), sympy.Rational(2, 7), sympy.Integer(-3)]

  def expression(depth):
    if not depth:
      return draw.choice(leaves)
    one, other = expression(depth - 1), expression(depth - 1)
    ways = (
      one + other, one * other, one - other, one / (other + 13), one**2, sympy.sin(one),
      sympy.exp(one), sympy.sqrt(one**2 + 2), sympy.log(one**2 + 2), 3 + sympy.I * one,
    )  # fmt: skip
    return draw.choice(ways)

  compared = 0
  while compared < 20:
    gold = expression(draw.randint(1, 3))
    if gold.is_Rational or gold == 0 or len(sympy.latex(gold)) > 150:
      continue
    compared += 1
    for rewritten in (sympy.expand(gold), sympy.factor(gold), sympy.together(gold)):
      texts = [
        sympy.latex(answer, ln_notation=True)
        for answer in (rewritten, rewritten * 1.01, rewritten + 1)
      ]
      grades = [
        mathematics(_boxed(text), {"answer": sympy.latex(gold, ln_notation=True)}) for text in texts
      ]
      outcomes = [grade.outcome for grade in grades]
      assert outcomes == [Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG], (gold, texts)


# Spellings that a policy may choose among, of a number @.
SPELLINGS = (
  "@", " @ ", "@.0", "@.", "0@", "+@", "$@$", r"\(@\)", r"\text{@}", r"\left(@\right)", "(@)",
  r"\{@\}", "[@]", "x=@", "@=x", "x = @", r"x \approx @", r"\$ @", r"\$@", "@°", r"@^\circ",
  r"@\text{ cm}", "@ cm", "@ apples", r"@\text{ K}", "@ K", "@K", r"@\%", "@ dozen",
  "@ cents", "@ radians", "at most @", r"\text{less than } @", "about @", "@ a.m.", "@:30",
  "1 to @", r"\textbf{(B) }@", "(B) @", "@ 2", r"@\,2", r"@\;345", r"@\,345", "@,345", "@_2",
  "@, 7", "7 and @", "a=@, b=7", "b=7, a=@", r"\{x \mid x<@\}", "x<@", r"\sqrt{@}", r"2^{@}", "@m",
  "@ m", r"@\pi", r"@\text{ at most}", "ABC @", "@/1", r"\frac{@}{1}", r"\frac@2", r"@\approx @.0",
)  # fmt: skip
QUICK_GOLDS = ("72", r"7\text{ cm}", r"\$7", "x=7", "(7,7)", "7_2", "ABC")
# The same ways through the grader; with those from a=7 on each spelling is compared by values.
SLOW_GOLDS = (
  "7", "12345", "7 cents", r"7^\circ", r"7\text{ K}", r"\{7\}", r"\text{(B) }7", r"7\%", "B",
  r"\angle ABC",
  "a=7,b=7",   r"7\pi", "7,7", "7m", "x<7", "xy", "7:30", "7:30 a.m.", r"\sqrt{7}", "[7,8)", "1:7",
  r"\frac{7\pi}{180}",   r"\log_2 7",
)  # fmt: skip
LETTERS = (
  "ABC",
  "CBA",
  "A B C",
  r"\text{ABC}",
  "abc",
  "xy",
  "yx",
  r"\text{xy}",
  "x y",
  "B",
  "b",
  "(B)",
)


@pytest.mark.parametrize(
  "gold", [*QUICK_GOLDS, *(pytest.param(gold, marks=pytest.mark.slow) for gold in SLOW_GOLDS)]
)
def test_one_normal_form_one_grade(gold):
  """Whatever the spelling; and the normal form of a normal form is itself, with the same grade."""
  graded = {}
  spelled = [
    spelling.replace("@", number) for spelling in SPELLINGS for number in ("7", "12", "72")
  ]
  for text in (gold, *spelled, *(f"{each}, 7" for each in spelled), *LETTERS):
    grade = mathematics(rf"\boxed{{{text}}}", {"answer": gold})
    assert grade.outcome in (Outcome.CORRECT, Outcome.WRONG), (text, grade)
    assert graded.setdefault(grade.answer, grade.outcome) is grade.outcome, text
    again = mathematics(rf"\boxed{{{grade.answer}}}", {"answer": gold})
    assert (again.answer, again.outcome) == (grade.answer, grade.outcome), text
  assert len(set(graded.values())) == 2  # some are right, some are wrong


@settings(max_examples=12, derandomize=True, deadline=None)
@given(
  gold=st.sampled_from(QUICK_GOLDS),
  pairs=st.lists(st.tuples(*[st.sampled_from(SPELLINGS)] * 2), min_size=20, max_size=20),
)
def test_one_normal_form_one_grade_for_spellings_within_spellings(gold, pairs):
  graded = {}
  for outer, inner in pairs:
    for number in ("7", "72", "12"):
      text = outer.replace("@", inner.replace("@", number))
      grade = mathematics(rf"\boxed{{{text}}}", {"answer": gold})
      assert graded.setdefault(grade.answer, grade.outcome) is grade.outcome, text


@pytest.mark.parametrize(
  "gold", [r"\log_2 3", r"\log_2 x", r"\sqrt{2}", "x^2+5", r"e^{2}", r"\ln 2+\ln 3"]
)
def test_a_huge_or_long_number_costs_little(gold):
  mathematics(r"\boxed{\frac{1}{\sqrt{2}}}", {"answer": r"\frac{\sqrt{2}}{2}"})  # imports mpmath
  began = time.process_time()
  for answer in (
    "1e400",
    "1e-400",
    "10^{999}",
    "10^{12}",
    r"10^{999}\log 2",
    r"10^{9}\ln 3+x",
    "2^{8000}" + r"+e^i\ln 3" * 90,
    *(f"1,2{sign * 300}" for sign in "°€¢"),
    "9" * 900,
  ):
    grade = mathematics(rf"\boxed{{{answer}}}", {"answer": gold})
    assert grade.outcome is Outcome.WRONG, (answer, grade)
  assert time.process_time() - began < 1.5
