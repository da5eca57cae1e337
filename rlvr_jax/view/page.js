"use strict";
// The page of a run. `read.py` says what a part of the data has, `write.py` how it is encoded.
// Texts of a run reach the document as text nodes only, with control characters made visible.

const SERVED = document.body.dataset.served === "true";
const RELOAD_MS = 10000; // of a served run's metrics
const CHUNK = 400; // tokens, or rows of a list, that are drawn at a time
const state = {
  summaries: [], // a part for each run
  colour: "logprob",
  layer: 0,
  differences: false,
  order: "by_reward",
  more: "",
  filter: { text: "", outcome: "", least: "", most: "", spread: "", sort: "interest" },
};

// --- elements ------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(4).filter((child) => child !== null && child !== undefined));
  return node;
}

const HIDDEN =
  /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb])/u;

// A text's nodes; characters that are not seen, or turn the direction of others, show as their code.
function visible(text) {
  return String(text)
    .split(HIDDEN)
    .filter((part) => part !== "")
    .map((part) => {
      if (!HIDDEN.test(part)) return document.createTextNode(part);
      const code = part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      return el("span", { class: "control", title: "a character that is not seen" }, `U+${code}`);
    });
}

const text = (value, kind = "text") => el("span", { class: kind, dir: "ltr" }, visible(value));

const note = (...words) => el("p", { class: "note" }, words);
const button = (sign, title, onclick) => el("button", { type: "button", title, onclick }, sign);

// A table of rows of cells; a cell that is no element becomes one.
function table(heads, rows, attributes = {}) {
  const cell = (content) => (content?.tagName === "TD" ? content : el("td", {}, content));
  const head = heads.length
    ? el(
        "tr",
        {},
        heads.map((words) => el("th", {}, words)),
      )
    : null;
  return el(
    "table",
    attributes,
    head,
    rows.map((row) => (row.tagName === "TR" ? row : el("tr", {}, row.map(cell)))),
  );
}

function select(label, value, options, onchange) {
  const box = el(
    "select",
    { "aria-label": label, onchange: (event) => onchange(event.target.value) },
    options.map(([key, shown, disabled]) =>
      el("option", { value: key, selected: String(key) === String(value), disabled }, shown),
    ),
  );
  return el("label", { class: "field" }, label, box);
}

function input(label, value, oninput, more = {}) {
  const box = el("input", { value, "aria-label": label, ...more });
  box.addEventListener("input", () => oninput(box.value));
  return el("label", { class: "field" }, label, box);
}

// Appends what `make` returns for 0 … count − 1, a chunk at a time as the end comes into view.
function appendLazily(parent, count, make, chunk = CHUNK) {
  let next = 0;
  const more = () => {
    const end = Math.min(count, next + chunk);
    const fragment = document.createDocumentFragment();
    for (; next < end; next++) fragment.append(make(next));
    sentinel.before(fragment);
    observer.disconnect();
    if (next < count)
      observer.observe(sentinel); // anew: its end may still be in view
    else sentinel.remove();
  };
  const sentinel = el("span", { class: "sentinel" });
  sentinel.fill = more;
  parent.append(sentinel);
  const observer = new IntersectionObserver(
    (entries) => entries.some((e) => e.isIntersecting) && more(),
  );
  more();
}

// Calls `paint` once the node is near the view, and again when its size changes.
function drawLazily(node, paint) {
  let seen = false;
  new IntersectionObserver(
    (entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      seen = true;
      paint();
    },
    { rootMargin: "300px" },
  ).observe(node);
  new ResizeObserver(() => seen && node.isConnected && paint()).observe(node);
}

// --- data ----------------------------------------------------------------------------------------

const parts = new Map(); // name → promise of a part, the last few

function load(name, { fresh = false } = {}) {
  if (fresh || !parts.has(name)) {
    parts.set(
      name,
      readPart(name).catch((error) => {
        parts.delete(name);
        throw error;
      }),
    );
    while (parts.size > 6) parts.delete(parts.keys().next().value);
  }
  return parts.get(name);
}

const heldBatches = (run) =>
  state.summaries[run].header.batches.filter((n) => isHere(`${run}/batch/${n}`));
const isHere = (name) => SERVED || document.getElementById(name) !== null;

async function readPart(name) {
  const bytes = await compressed(name);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parsePart(await new Response(stream).arrayBuffer());
}

async function compressed(name) {
  const element = document.getElementById(name);
  if (element) return fromBase64(element.textContent);
  if (!SERVED) throw new Error("this file does not hold it");
  const response = await fetch(`/data/${name}`);
  if (!response.ok) throw new Error(`the server says: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

function fromBase64(characters) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(characters);
  const binary = atob(characters);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

const TYPES = {
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  float16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
};

function parsePart(buffer) {
  const start = 4 + new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, start - 4)));
  const arrays = {};
  for (const [name, dtype, shape, offset] of header.arrays) {
    const count = shape.reduce((a, b) => a * b, 1);
    const values = new TYPES[dtype](buffer, start + offset, count);
    arrays[name] = dtype === "float16" ? fromHalf(values) : values;
  }
  return { header, arrays };
}

// float16 as float32, by a table of all 65,536.
function fromHalf(halves) {
  fromHalf.table ??= Float32Array.from({ length: 65536 }, (_, bits) => {
    const sign = bits >> 15 ? -1 : 1,
      exponent = (bits >> 10) & 31,
      fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
  });
  const { table } = fromHalf,
    values = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i++) values[i] = table[halves[i]];
  return values;
}

// A batch with what views ask of it: first token and record of each rollout.
async function loadBatch(run, number) {
  const part = await load(`${run}/batch/${number}`);
  if (!part.rollouts) {
    const [, G] = part.header.size;
    let start = 0;
    part.rollouts = part.header.samples.map((sample, index) => {
      const length = part.header.lengths[index];
      const group = Math.floor(index / G);
      const made = { sample, index, group, place: index % G, start, length, kind: kindOf(sample) };
      start += length;
      return made;
    });
    part.characters = new Map(
      part.header.characters.map(([first, shown, width]) => [first, [shown, width]]),
    );
  }
  return part;
}

const several = () => state.summaries.length > 1;
const letter = (run) => (several() ? `${"AB"[run]} · ` : ""); // of a run, where there are two

// --- numbers and colours -------------------------------------------------------------------------

function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const shown =
    Number.isInteger(value) && size < 1e9
      ? value.toLocaleString("en")
      : size >= 1e6 || (size < 1e-4 && size > 0)
        ? Number(value.toPrecision(2)).toExponential()
        : Number(value.toPrecision(3));
  return String(shown).replaceAll("-", "−");
}

const BLUE = [0, 114, 178],
  ORANGE = [213, 94, 0],
  AMBER = [230, 159, 0],
  PINK = [204, 121, 167];
const CATEGORIES = [
  BLUE,
  AMBER,
  [0, 158, 115],
  PINK,
  [86, 180, 233],
  ORANGE,
  [140, 140, 140],
  [180, 170, 0],
];
const rgba = ([r, g, b], alpha = 1) => `rgba(${r}, ${g}, ${b}, ${alpha.toFixed(3)})`;
const DARK = matchMedia("(prefers-color-scheme: dark)");
const line = (colour, alpha) =>
  rgba(DARK.matches ? colour.map((x) => Math.round(x + 0.3 * (255 - x))) : colour, alpha);
const tint = (colour, x) => rgba(colour, (DARK.matches ? 0.5 : 0.85) * Math.max(0, Math.min(1, x))); // behind a text
const diverging = (x) => rgba(x < 0 ? ORANGE : BLUE, 0.7 * Math.min(1, Math.abs(x)));
const category = (n) => rgba(CATEGORIES[((n % 8) + 8) % 8], 0.42);

// Kind of a rollout → [sign, colour, words]; the sign tells kinds apart without colour.
const KINDS = {
  correct: ["✓", BLUE, "correct"],
  wrong: ["✗", ORANGE, "wrong"],
  unparseable: ["?", AMBER, "unparseable"],
  truncated: ["✂", [120, 120, 120], "truncated at the length limit"],
  turn_limit: ["↻", PINK, "out of turns"],
  refused: ["⊘", [0, 158, 115], "refused or limited by the environment"],
  ungraded: ["!", [150, 150, 150], "not graded"],
};

function kindOf(sample) {
  if (!sample.stopped) return "truncated";
  if (sample.outcome === "environment_refused" || sample.outcome === "environment_limit")
    return "refused";
  return sample.outcome in KINDS ? sample.outcome : "ungraded";
}

function mark(kind, more = "") {
  const [sign, colour, words] = KINDS[kind];
  return el("i", { class: "mark", title: words + more, style: { "--kind": rgba(colour) } }, sign);
}

const ratioTo = (other, of) => ({
  title: `log ratio to the ${other}`,
  of,
  measured: true,
  note: `log of policy ÷ ${other}`,
  colour: (x) => diverging(x / 0.7),
  legend: [-0.7, -0.3, 0, 0.3, 0.7],
});

const markOf = (title, by, colour) => ({
  title,
  of: title,
  measured: true,
  note: by,
  colour: (x) => (x ? tint(colour, 0.3 + 0.4 * x) : ""),
  legend: [0, 1],
  words: (x) => (x ? title : "not"),
});

// How tokens can be coloured: title, the array that is needed, colour of a value, legend; those
// that are measured stand for one update.
const COLOURS = {
  none: { title: "none" },
  logprob: {
    title: "log-probability (sampler)",
    of: "logprob",
    note: "log β, nats: rarer is stronger",
    colour: (x) => tint(AMBER, -x / 4),
    legend: [0, -0.5, -1, -2, -3, -4],
  },
  ratio: ratioTo("sampler", "ratio"),
  proximal: ratioTo("proximal policy", "proximal"),
  entropy: {
    title: "entropy",
    of: "entropy",
    measured: true,
    note: "of the policy, nats",
    colour: (x) => tint(CATEGORIES[4], x / 4),
    legend: [0, 0.5, 1, 2, 3],
  },
  clipped: markOf("clipped", "by a bound of the loss", ORANGE),
  dropped: markOf("dropped", "by the correction", PINK),
  vetoed: markOf("vetoed", "by the veto", AMBER),
  advantage: {
    title: "advantage",
    of: "advantage",
    scaled: true,
    note: "of the run's estimator, from the stored rewards",
    colour: (x) => diverging(x),
    legend: [-1, -0.5, 0, 0.5, 1],
  },
  coefficient: {
    title: "coefficient in the loss",
    of: "coefficient",
    measured: true,
    scaled: true,
    note: "after the reweighting",
    colour: (x) => diverging(x),
    legend: [-1, -0.5, 0, 0.5, 1],
  },
  mask: {
    title: "in the loss",
    of: "mask",
    note: "grey: masked, no loss has it",
    colour: (x) => (x ? rgba(BLUE, 0.28) : "var(--masked)"),
    legend: [0, 1],
    words: (x) => (x ? "in the loss" : "masked"),
  },
  version: {
    title: "version",
    of: "version",
    note: "updates before the policy that sampled",
    colour: category,
    distinct: true,
  },
  lag: {
    title: "lag",
    of: "lag",
    note: "updates between sampling and training",
    colour: (x) => tint(PINK, x / 8),
    legend: [0, 1, 2, 4, 8],
  },
  turn: {
    title: "turn",
    of: "turn",
    note: "even: the policy's, odd: the environment's",
    colour: category,
    distinct: true,
  },
  expert: {
    title: "route",
    of: "expert",
    note: "first expert of the layer",
    colour: category,
    distinct: true,
  },
};

// (token, rollout) → value, of a batch's array with an entry for each token, rollout or layer.
function reader(batch, name) {
  const values = batch.arrays[name];
  if (!values) return null;
  const N = batch.arrays.token.length;
  if (name === "expert") return (i) => values[state.layer * N + i];
  return (values.length === batch.rollouts.length && values.length !== N) ||
    name === "coefficient" ||
    (name === "advantage" && values.length !== N)
    ? (i, rollout) => values[rollout.index]
    : (i) => values[i];
}

function largest(values) {
  let most = 0;
  for (const x of values) if (Math.abs(x) > most) most = Math.abs(x);
  return most || 1;
}

// (token, rollout) → colour, for the chosen array; null if it is not stored.
function painter(batch) {
  const how = COLOURS[state.colour],
    read = how.of && reader(batch, how.of);
  if (!read) return null;
  const scale = how.scaled ? largest(batch.arrays[how.of]) : 1;
  return (i, rollout) => {
    const value = read(i, rollout);
    return Number.isNaN(value) ? "" : how.colour(value / scale);
  };
}

function legend(batch) {
  const how = COLOURS[state.colour];
  if (!how.of || !batch.arrays[how.of]) return null;
  const scale = how.scaled ? largest(batch.arrays[how.of]) : 1;
  const values = how.distinct
    ? [...new Set(batch.arrays[how.of])].sort((a, b) => a - b).slice(0, 12)
    : how.legend;
  const words = how.words ?? ((x) => show(x * scale));
  return el(
    "span",
    { class: "legend" },
    how.note ? `${how.note} ` : "",
    values.map((x) =>
      el("span", { class: "swatch", style: { background: how.colour(x) } }, words(x)),
    ),
  );
}

// --- charts --------------------------------------------------------------------------------------

function canvasFor(node, height) {
  const width = node.clientWidth,
    scale = devicePixelRatio || 1;
  const canvas = node.querySelector("canvas") ?? node.appendChild(el("canvas"));
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return [context, width, canvas];
}

const css = (name) => getComputedStyle(document.body).getPropertyValue(name);

function ticks(low, high, count = 4) {
  const raw = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step / 1e6; x += step)
    found.push(Math.abs(x) < step / 1e6 ? 0 : x);
  return found;
}

// With as many digits as tell a tick from the next one.
function showTick(y, marks) {
  const decimals =
    marks.length > 1 ? -Math.floor(Math.log10(marks[1] - marks[0]) + 1e-9) : 0;
  const digits = Math.floor(Math.log10(Math.abs(y))) + 1 + decimals;
  return decimals > 0 && digits > 3
    ? y.toFixed(decimals).replace("-", "−")
    : show(Number(y.toPrecision(6)));
}

// Whole logarithms between two; within one decade, logarithms of even values.
function logTicks(low, high) {
  if (high - low < 1)
    return ticks(10 ** low, 10 ** high, 3)
      .filter((y) => y > 0)
      .map(Math.log10);
  const step = Math.ceil((high - low) / 4),
    first = Math.ceil(low);
  return Array.from({ length: Math.floor((high - first) / step) + 1 }, (_, k) => first + k * step);
}

const T_975 = [
  12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.2, 2.18, 2.16, 2.14, 2.13, 2.12,
  2.11, 2.1, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
];

const quantile = (n) => T_975[n - 2] ?? 1.96 + 2.4 / (n - 1); // of n values

// Mean and half a 95 % interval of it (Student's t, independent values); null without two values.
function meanInterval(values) {
  const n = values.length;
  if (n < 2) return null;
  const mean = values.reduce((a, b) => a + b, 0) / n;
  const variance = values.reduce((a, b) => a + (b - mean) ** 2, 0) / (n - 1);
  return [mean, quantile(n) * Math.sqrt(variance / n)];
}

// Points [x, y, low, high] of a metric; the band is the metric's own, or of a running mean.
function series(summary, phase, name, low, high) {
  const column = summary.arrays[`${phase}|${name}`],
    steps = summary.arrays[`${phase}|step`];
  if (!column) return null;
  const ends = [low, high].map((end) => end && summary.arrays[`${phase}|${end}`]);
  const points = [];
  for (let i = 0; i < column.length; i++) {
    if (Number.isFinite(column[i])) points.push([steps[i], column[i], ends[0]?.[i], ends[1]?.[i]]);
  }
  points.hasOwn = Boolean(ends[0] || ends[1]);
  return points.length ? points : null;
}

// Running means of y with 95 % intervals, as if points were independent; `raw` has the points.
function smooth(points) {
  const n = points.length,
    half = Math.max(2, Math.floor(Math.min(n / 30, Math.max(25, n / 100))));
  if (n < 10) return points;
  const shift = points[0][1],
    sums = [0],
    squares = [0]; // sums up to each point
  points.forEach(([, y], i) => {
    sums.push(sums[i] + y - shift);
    squares.push(squares[i] + (y - shift) ** 2);
  });
  const smoothed = points.map(([x], i) => {
    const from = Math.max(0, i - half),
      to = Math.min(n, i + half + 1),
      count = to - from;
    const mean = (sums[to] - sums[from]) / count;
    const variance = Math.max(0, squares[to] - squares[from] - count * mean ** 2) / (count - 1);
    const spread = quantile(count) * Math.sqrt(variance / count);
    return [x, shift + mean, shift + mean - spread, shift + mean + spread];
  });
  smoothed.raw = points;
  return smoothed;
}

// Means of consecutive points and of their bands, where there are too many to be drawn.
function condense(points, most = 200) {
  if (points.length <= 2 * most) return points;
  const size = points.length / most;
  const condensed = Array.from({ length: most }, (_, k) => {
    const part = points.slice(Math.floor(k * size), Math.floor((k + 1) * size));
    return [0, 1, 2, 3].map((c) => part.reduce((sum, p) => sum + p[c], 0) / part.length);
  });
  condensed.size = Math.round(size);
  return condensed;
}

// At most 2 points for each of `count` columns: the lowest and the highest.
function thin(points, count) {
  if (points.length <= 2 * count) return points;
  const kept = [],
    size = points.length / count;
  for (let c = 0; c < count; c++) {
    const part = points.slice(Math.floor(c * size), Math.floor((c + 1) * size));
    if (!part.length) continue;
    const ordered = [...part].sort((a, b) => a[1] - b[1]);
    kept.push(...[ordered[0], ordered[ordered.length - 1]].sort((a, b) => a[0] - b[0]));
  }
  return kept;
}

// What the marks of a figure mean, of [class, colour, words].
const keysOf = (rows) =>
  el(
    "div",
    { class: "keys" },
    rows.map(([kind, colour, words]) =>
      el("span", { class: "key" }, el("i", { class: kind, style: { "--key": colour } }), words),
    ),
  );

const figure = (title, note, ...inside) =>
  el(
    "figure",
    { class: "chart" },
    el("figcaption", {}, title, note ? el("small", {}, note) : null),
    inside,
  );

// A chart of lines: [{label, points, colour, dash}]; a pointer reads the values.
function chart(title, lines, { log = false, note = "" } = {}) {
  const plot = el("div", { class: "plot" }),
    reading = el("output", { class: "reading" });
  const keys = keysOf(
    lines.map(({ label, colour, dash }) => [dash ? "dashed" : "", line(colour), label]),
  );
  const height = 150,
    left = 54, // room for −2.8e−11
    bottom = 18;
  const draw = (cursor) => {
    const [c, width] = canvasFor(plot, height);
    const all = lines.flatMap(({ points }) => [...points, ...(points.raw ?? [])]);
    const xs = all.map((p) => p[0]);
    const ys = all
      .flatMap((p) => p.slice(1))
      .filter((y) => Number.isFinite(y) && (!log || y > 0))
      .map((y) => (log ? Math.log10(y) : y));
    if (!ys.length) return;
    let [x0, x1, y0, y1] = [least(xs), most(xs), least(ys), most(ys)];
    if (x0 === x1) x1 = x0 + 1;
    const rounding = log ? 0 : 1e-5 * Math.max(Math.abs(y0), Math.abs(y1));
    if (y1 - y0 <= rounding)
      [y0, y1] = y0 === 0 ? [0, 1] : [y0 - 0.5 * Math.abs(y0), y1 + 0.5 * Math.abs(y1)];
    const X = (x) => left + ((width - left - 6) * (x - x0)) / (x1 - x0);
    const Y = (y) =>
      6 +
      (height - bottom - 6) * (1 - ((log ? Math.log10(Math.max(y, 1e-30)) : y) - y0) / (y1 - y0));
    axes(c, { width, height, left, bottom, x0, x1, y0, y1, X, Y, log });
    for (const one of lines) drawLine(c, one, X, Y, width, log);
    if (cursor !== undefined) {
      const x = x0 + ((x1 - x0) * (cursor - left)) / (width - left - 6);
      const nearest = lines.map(({ points }) => closest(points, x));
      c.strokeStyle = css("--faint");
      c.beginPath();
      c.moveTo(X(nearest[0][0]), 6);
      c.lineTo(X(nearest[0][0]), height - bottom);
      c.stroke();
      reading.textContent = `${show(nearest[0][0])}: ` + nearest.map((p) => reads(p)).join("  ·  ");
    }
  };
  plot.addEventListener("pointermove", (event) => draw(event.offsetX));
  plot.addEventListener("pointerleave", () => {
    reading.textContent = "";
    draw();
  });
  drawLazily(plot, () => draw());
  return figure(title, note, plot, keys, reading);
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const closest = (points, x) =>
  points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
const reads = ([, y, low, high]) =>
  show(y) + (Number.isFinite(low) && Number.isFinite(high) ? ` [${show(low)}, ${show(high)}]` : "");

function axes(c, { width, height, left, bottom, x0, x1, y0, y1, X, Y, log }) {
  c.clearRect(0, 0, width, height);
  c.strokeStyle = css("--line");
  c.fillStyle = css("--faint");
  c.lineWidth = 1;
  c.textAlign = "right";
  const marks = log ? logTicks(y0, y1) : ticks(y0, y1);
  for (const y of marks) {
    const at = Y(log ? 10 ** y : y);
    c.beginPath();
    c.moveTo(left, at);
    c.lineTo(width - 6, at);
    c.stroke();
    c.fillText(log ? show(10 ** y) : showTick(y, marks), left - 5, at + 4);
  }
  for (const x of ticks(x0, x1, Math.max(2, width / 90)).filter(Number.isInteger)) {
    c.textAlign = X(x) > width - 24 ? "right" : "center";
    c.fillText(show(x), Math.min(X(x), width - 1), height - 4);
  }
}

function drawLine(c, { points, colour, dash }, X, Y, width, log) {
  const shown = thin(points, width),
    isOn = (y) => Number.isFinite(y) && (!log || y > 0);
  const banded = shown.filter((p) => Number.isFinite(p[2]) && Number.isFinite(p[3]));
  if (banded.length > 1) {
    c.fillStyle = line(colour, 0.18);
    c.beginPath();
    banded.forEach((p, i) => c[i ? "lineTo" : "moveTo"](X(p[0]), Y(p[3])));
    [...banded].reverse().forEach((p) => c.lineTo(X(p[0]), Y(p[2])));
    c.fill();
  }
  const stroke = (curve, alpha, thickness) => {
    c.strokeStyle = line(colour, alpha);
    c.lineWidth = thickness;
    c.setLineDash(dash ? [5, 3] : []);
    c.beginPath();
    curve.filter((p) => isOn(p[1])).forEach((p, i) => c[i ? "lineTo" : "moveTo"](X(p[0]), Y(p[1])));
    c.stroke();
    c.setLineDash([]);
  };
  if (points.raw) stroke(thin(points.raw, width), 0.3, 1);
  stroke(shown, 1, 2);
  if (shown.length < 40) {
    c.fillStyle = line(colour);
    for (const p of shown)
      if (isOn(p[1])) {
        c.beginPath();
        c.arc(X(p[0]), Y(p[1]), 2.5, 0, 7);
        c.fill();
      }
  }
}

// --- the run -------------------------------------------------------------------------------------

const CHARTS = [
  { title: "Reward", names: ["reward/mean", "reward/pass_rate"] },
  { title: "Groups", names: ["groups/effective", "groups/all_correct", "groups/all_wrong"] },
  { title: "Entropy", unit: "nats per token", names: ["policy/entropy"] },
  {
    title: "Response length",
    unit: "tokens; band from p10 to p90",
    names: ["response/length_p50"],
    low: "response/length_p10",
    high: "response/length_p90",
  },
  { title: "Truncated", names: ["response/truncated"] },
  { title: "Effective sample size", names: ["behavior/ess", "loss/ess", "advantage/ess"] },
  {
    title: "KL",
    unit: "nats per token, logarithmic",
    names: ["behavior/kl_k3", "reference/kl", "teacher/kl_k3"],
    log: true,
  },
  {
    title: "Lag",
    unit: "updates; band up to the largest",
    names: ["staleness/mean"],
    low: "staleness/mean",
    high: "staleness/max",
  },
  {
    title: "Ratio",
    unit: "mean; band up to the largest",
    names: ["behavior/ratio_mean"],
    low: "behavior/ratio_mean",
    high: "behavior/ratio_max",
  },
  { title: "Gradient norm", names: ["update/gradient_norm"] },
  {
    title: "Clipped",
    unit: "share of loss tokens",
    names: ["loss/clip_fraction", "veto/token_fraction"],
  },
];

function metricNames(phase) {
  const names = new Set();
  for (const summary of state.summaries) {
    for (const key of Object.keys(summary.arrays))
      if (key.startsWith(`${phase}|`)) names.add(key.slice(phase.length + 1));
  }
  names.delete("step");
  return [...names].sort();
}

// Colours tell metrics apart and dashes runs; of one metric, colours tell runs apart too.
function lineChart({ title, unit, names, low, high, log, phase = "train" }) {
  const known = metricNames(phase);
  const shown = names.filter((name) => known.includes(name)).slice(0, several() ? 2 : names.length);
  const notes = unit ? [unit] : [];
  if (several() && state.differences) {
    const found = differences(shown, phase);
    if (found.length) return chart(title, found, { note: notes.join() });
  }
  const lines = shown
    .flatMap((name, n) =>
      state.summaries.map((summary, run) => {
        const points = series(summary, phase, name, low ?? `${name}_low`, high ?? `${name}_high`);
        if (!points) return null;
        const drawn = points.hasOwn || phase !== "train" || log ? condense(points) : smooth(points);
        const colour = several() && shown.length === 1 ? [BLUE, ORANGE][run] : CATEGORIES[n % 8];
        return {
          label: several() ? `${name} · ${"AB"[run]}` : name,
          points: drawn,
          colour,
          dash: run === 1,
        };
      }),
    )
    .filter(Boolean);
  if (lines.some(({ points }) => points.raw)) notes.push("running mean with 95 % interval");
  if (lines[0]?.points.size) notes.push(`means of ${lines[0].points.size} updates`);
  return lines.length ? chart(title, lines, { log, note: notes.join("; ") }) : null;
}

// B − A of metrics, at the steps that both runs have.
function differences(names, phase) {
  const lines = names
    .map((name, n) => {
      const [a, b] = state.summaries.map(
        (summary) => new Map((series(summary, phase, name) ?? []).map((p) => [p[0], p[1]])),
      );
      const points = [...a].filter(([x]) => b.has(x)).map(([x, y]) => [x, b.get(x) - y]);
      return points.length
        ? {
            label: `${name}, B − A`,
            points: phase === "train" ? smooth(points) : points,
            colour: CATEGORIES[n % 8],
          }
        : null;
    })
    .filter(Boolean);
  return lines;
}

function evalCharts() {
  const names = metricNames("eval").filter(isPassRate);
  names.sort((a, b) => Number(a.split("@")[1]) - Number(b.split("@")[1]));
  const chosen = {
    title: "Held-out pass@k",
    unit: "95 % interval over problems",
    names,
    phase: "eval",
  };
  return names.length ? [lineChart(chosen)] : [];
}

function tiles() {
  const last = (summary, phase, name) => series(summary, phase, name)?.at(-1);
  return el(
    "div",
    { class: "tiles" },
    state.summaries.flatMap((summary, run) => {
      const steps = summary.arrays["train|step"];
      const found = [["updates", show(steps ? steps[steps.length - 1] : 0)]];
      for (const [label, phase, name] of [
        ["pass@1", "eval", "eval/pass@1"],
        ["reward", "train", "reward/mean"],
        ["entropy", "train", "policy/entropy"],
        ["truncated", "train", "response/truncated"],
      ]) {
        const point = last(summary, phase, name);
        if (point) found.push([label, show(point[1])]);
      }
      const name = several() ? `${"AB"[run]}: ${summary.header.name}` : summary.header.name;
      return el(
        "section",
        { class: "tile-row" },
        el("h2", { title: summary.header.folder }, visible(name)),
        found.map(([label, value]) => el("div", { class: "tile" }, el("b", {}, value), label)),
      );
    }),
  );
}

const PHASES = ["generate", "grade", "sync_weights", "optimise", "evaluate", "idle"];

// Seconds of each phase by update, stacked; evaluations count to the update before them.
function timeChart(summary, run) {
  const totals = new Map(),
    byStep = new Map();
  for (const phase of ["train", "eval"]) {
    const steps = summary.arrays[`${phase}|step`];
    for (const name of PHASES) {
      const column = summary.arrays[`${phase}|time/${name}_seconds`];
      column?.forEach((seconds, i) => {
        if (!Number.isFinite(seconds)) return;
        totals.set(name, (totals.get(name) ?? 0) + seconds);
        const at = byStep.get(steps[i]) ?? byStep.set(steps[i], {}).get(steps[i]);
        at[name] = (at[name] ?? 0) + seconds;
      });
    }
  }
  if (!totals.size) return null;
  const plot = el("div", { class: "plot" });
  const steps = [...byStep.keys()].sort((a, b) => a - b),
    height = 150,
    left = 44,
    bottom = 18;
  drawLazily(plot, () => {
    const [c, width] = canvasFor(plot, height);
    const bars = Math.min(steps.length, Math.floor((width - left) / 3)),
      size = steps.length / bars;
    const rows = Array.from({ length: bars }, (_, b) => {
      const inside = steps.slice(
        Math.floor(b * size),
        Math.max(Math.floor(b * size) + 1, Math.floor((b + 1) * size)),
      );
      return PHASES.map(
        (name) =>
          inside.reduce((sum, step) => sum + (byStep.get(step)[name] ?? 0), 0) / inside.length,
      );
    });
    const y1 = most(rows.map((row) => row.reduce((a, b) => a + b, 0))) || 1;
    const X = (x) =>
      left + ((width - left - 6) * (x - steps[0] + 0.5)) / (steps.at(-1) - steps[0] + 1);
    const Y = (y) => 6 + (height - bottom - 6) * (1 - y / y1);
    axes(c, {
      width,
      height,
      left,
      bottom,
      x0: steps[0],
      x1: steps.at(-1) + (steps.length === 1),
      y0: 0,
      y1,
      X,
      Y,
    });
    const step = (width - left - 6) / bars;
    rows.forEach((row, b) => {
      let below = 0;
      row.forEach((seconds, p) => {
        c.fillStyle = line(CATEGORIES[p], 0.85);
        c.fillRect(
          left + b * step,
          Y(below + seconds),
          Math.max(1, step - 1),
          Y(below) - Y(below + seconds),
        );
        below += seconds;
      });
    });
  });
  const sum = [...totals.values()].reduce((a, b) => a + b, 0);
  const share = (name) => `${name.replace("_", " ")} ${Math.round((100 * totals.get(name)) / sum)} %`;
  const keys = keysOf(
    PHASES.flatMap((name, p) =>
      totals.has(name) ? [["box", line(CATEGORIES[p], 0.85), share(name)]] : [],
    ),
  );
  const title = `Time by phase${several() ? ` · ${"AB"[run]}` : ""}`;
  return figure(title, `seconds per update, ${show(Math.round(sum))} s in all`, plot, keys);
}

function moreMetrics() {
  const known = new Set(CHARTS.flatMap((c) => c.names));
  const names = ["train", "eval"].flatMap((phase) =>
    metricNames(phase)
      .filter((name) => !known.has(name))
      .map((name) => [`${phase}|${name}`, name]),
  );
  const place = el("div", { class: "charts" });
  const add = (value) => {
    state.more = value;
    const [phase, name] = value.split("|");
    place.replaceChildren(
      ...(name ? [lineChart({ title: name, names: [name], phase })].filter(Boolean) : []),
    );
  };
  if (state.more) add(state.more);
  return [
    el("p", {}, select("any other metric", state.more, [["", "choose …"], ...names], add)),
    place,
  ];
}

const isPassRate = (name) => /^eval\/pass@\d+$/.test(name);
const interval = ([mean, half]) => `${show(mean)} [${show(mean - half)}, ${show(mean + half)}]`;

function pairedTable() {
  const names = [
    ...CHARTS.map((c) => ["train", c.names[0]]),
    ...metricNames("eval")
      .filter(isPassRate)
      .map((name) => ["eval", name]),
  ];
  const rows = names.flatMap(([phase, name]) => {
    const curve = differences([name], phase)[0];
    const values = (curve?.points.raw ?? curve?.points ?? []).map((p) => p[1]);
    const found = meanInterval(values);
    return found ? [[name, interval(found), show(values.length), show(values.at(-1))]] : [];
  });
  if (!rows.length) return null;
  return el(
    "section",
    {},
    el("h3", {}, "B − A, paired by update"),
    note(
      "Mean over the updates that both have, with its 95 % interval as if updates were independent; one seed each is an anecdote.",
    ),
    table(["metric", "B − A", "updates", "at the last"], rows),
  );
}

function recipeTable() {
  const fields = new Map(); // name → values of the base and of each run
  state.summaries.forEach((summary, run) =>
    summary.header.recipe.forEach(([name, base, value]) => {
      if (!fields.has(name)) fields.set(name, [base, ...state.summaries.map(() => base)]);
      fields.get(name)[1 + run] = value;
    }),
  );
  const rows = [...fields]
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, values]) =>
      el(
        "tr",
        { class: several() && values[1] !== values[2] ? "differs" : "" },
        el("td", {}, visible(name)),
        values.map((value) => el("td", {}, text(value, "code"))),
      ),
    );
  return el(
    "section",
    {},
    el("h3", {}, `Recipe: ${fields.size} fields differ from the base`),
    table(["field", "base", ...(several() ? ["A", "B"] : ["this run"])], rows, { class: "recipe" }),
  );
}

function messageList() {
  const items = state.summaries.flatMap((summary, run) =>
    summary.header.messages.map(([step, words]) =>
      el("li", {}, letter(run), step === null ? "" : `update ${step}: `, text(words)),
    ),
  );
  return el(
    "section",
    {},
    el("h3", {}, "Messages"),
    items.length
      ? el("ul", { class: "messages" }, items)
      : note(
          "No warning about responses, padding or skipped updates. What else a run says is printed, not stored.",
        ),
  );
}

function differencesBox() {
  const onchange = (event) => {
    state.differences = event.target.checked;
    draw();
  };
  return el(
    "label",
    { class: "field" },
    el("input", { type: "checkbox", checked: state.differences, onchange }),
    "curves of B − A",
  );
}

function runView() {
  const charts = [
    ...evalCharts(),
    ...CHARTS.map(lineChart),
    ...state.summaries.map(timeChart),
  ].filter(Boolean);
  return [
    tiles(),
    several() ? differencesBox() : null,
    charts.length
      ? el("div", { class: "charts" }, charts)
      : note("The run has written no metrics yet."),
    moreMetrics(),
    several() ? pairedTable() : null,
    messageList(),
    recipeTable(),
    leftOut(),
  ];
}

function leftOut() {
  if (SERVED) return note("Served: every stored batch can be loaded.");
  const lines = state.summaries.map(
    ({ header }, run) =>
      `${header.name}: ${heldBatches(run).length} of ${header.batches.length} batches are in this file.`,
  );
  const names = state.leftOut?.header.names ?? [];
  if (names.length) lines.push(`Left out: ${names.join(", ")}.`);
  return note(visible(`${lines.join(" ")} Others: --batches, or --serve for all.`));
}

// --- a batch -------------------------------------------------------------------------------------

function runPicker(run, go) {
  const options = state.summaries.map(({ header }, r) => [r, `${"AB"[r]}: ${header.name}`]);
  return several() ? select("run", run, options, (chosen) => go(Number(chosen))) : null;
}

function batchPicker(run, number) {
  const { batches, updates, measured } = state.summaries[run].header;
  const options = batches.map((n, i) => {
    const update = updates[i].length ? ` · update ${updates[i][0]}` : "";
    const name = `batch ${n}${update}${measured[i] ? " · measured" : ""}`;
    const held = isHere(`${run}/batch/${n}`);
    return [n, held ? name : `${name} · not in this file`, !held];
  });
  const go = (r, n) => {
    location.hash = `#batch/${r}/${n}`;
  };
  return el(
    "div",
    { class: "picker" },
    runPicker(run, (r) => go(r, number)),
    button("‹", "earlier batch ([)", () => step("batch", -1)),
    select("batch", number, options, (n) => go(run, n)),
    button("›", "later batch (])", () => step("batch", 1)),
  );
}

const ORDERS = {
  interest: ["most instructive", (g) => g.interest],
  index: ["as sampled", (g, p) => -p],
  spread: ["reward spread", (g) => g.spread],
  ratio: ["largest ratio", (g) => g.ratio],
  bounded: ["most clipped, dropped or vetoed", (g) => g.bounded],
  truncated: ["most truncated", (g) => g.truncated],
  garbled: ["most garbled", (g) => g.garbled],
  length: ["longest", (g, p, batch) => most(groupOf(batch, p).map((r) => r.length))],
};

// Whether a batch's groups can be in an order: some follow from what was measured.
const hasOrder = (batch, key) =>
  !["ratio", "bounded"].includes(key) || key in batch.header.groups[0];

const groupOf = (batch, p) =>
  batch.rollouts.slice(p * batch.header.size[1], (p + 1) * batch.header.size[1]);

// Groups that pass the filters, in the chosen order.
function chosenGroups(batch) {
  const { text: words, outcome, least: low, most: high, spread, sort } = state.filter;
  const needle = words.toLowerCase(),
    has = (content) => content.toLowerCase().includes(needle);
  const isLong = (r) => (!low || r.length >= Number(low)) && (!high || r.length <= Number(high));
  const isMixed = (group) => !spread || (spread === "mixed") === group.spread > 0;
  const passes = ({ group, p }) =>
    isMixed(group) &&
    groupOf(batch, p).some(
      (r) =>
        (!outcome || r.kind === outcome) &&
        isLong(r) &&
        (!needle || has(group.prompt) || group.messages?.some((m) => has(m.content)) || has(r.sample.completion)),
    );
  const key =
      ([, of]) =>
      ({ group, p }) =>
        of(group, p, batch),
    rank = key(ORDERS[hasOrder(batch, sort) ? sort : "interest"]);
  const found = batch.header.groups.map((group, p) => ({ group, p })).filter(passes);
  return found.sort((a, b) => rank(b) - rank(a) || a.p - b.p);
}

function filterBar(batch, update) {
  const { filter } = state;
  const change = (name) => (value) => {
    filter[name] = value;
    update();
  };
  const kinds = Object.keys(KINDS).filter((kind) => batch.rollouts.some((r) => r.kind === kind));
  return el(
    "form",
    { class: "filters", onsubmit: (event) => event.preventDefault() },
    input("search", filter.text, change("text"), {
      type: "search",
      id: "search",
      placeholder: "prompt or answer ( / )",
    }),
    select(
      "outcome",
      filter.outcome,
      [["", "any"], ...kinds.map((k) => [k, KINDS[k][2]])],
      change("outcome"),
    ),
    input("tokens from", filter.least, change("least"), { type: "number", min: 0, class: "short" }),
    input("to", filter.most, change("most"), { type: "number", min: 0, class: "short" }),
    select(
      "rewards",
      filter.spread,
      [
        ["", "any"],
        ["mixed", "differ in the group"],
        ["constant", "all equal"],
      ],
      change("spread"),
    ),
    select(
      "order",
      filter.sort,
      Object.entries(ORDERS).map(([k, [words]]) => [k, words, !hasOrder(batch, k)]),
      change("sort"),
    ),
  );
}

const byReward = (rollouts) =>
  [...rollouts].sort((a, b) => (b.sample.reward ?? -1) - (a.sample.reward ?? -1));
const solved = (rollouts) =>
  rollouts.filter((r) => r.sample.outcome === "correct").length / rollouts.length;

function strip(rollouts) {
  const words = (r) => `, reward ${show(r.sample.reward)}, ${r.length} tokens`;
  return el(
    "span",
    { class: "strip" },
    byReward(rollouts).map((r) => mark(r.kind, words(r))),
  );
}

function groupRow(run, batch, other, { group, p }) {
  const rollouts = groupOf(batch, p),
    lengths = rollouts.map((r) => r.length);
  const flags = [
    group.spread && "mixed",
    group.truncated && "truncated",
    group.garbled && "garbled",
  ].filter(Boolean);
  const facts = [
    `${Math.round(100 * solved(rollouts))} %`,
    `${least(lengths)}–${most(lengths)} tok`,
  ];
  if (flags.length) facts.push(flags.join(", "));
  const twin = other && sameGroup(other, p, group);
  return el(
    "a",
    { class: "row", href: `#group/${run}/${batch.header.number}/${p}` },
    el("span", { class: "number" }, `${p}`),
    el("span", { class: "prompt" }, visible(group.prompt.slice(-300).replaceAll("\n", " "))),
    strip(rollouts),
    twin ? strip(twin) : null,
    el("span", { class: "facts" }, facts.join(" · ")),
  );
}

function sameGroup(other, p, group) {
  return other.header.groups[p]?.prompt === group.prompt ? groupOf(other, p) : null;
}

async function otherBatch(run, number) {
  const other = 1 - run;
  return several() && heldBatches(other).includes(number) ? loadBatch(other, number) : null;
}

// The difference of solve rates over the prompts that both batches have, B − A.
function pairedPrompts(run, batch, other) {
  const sign = run === 0 ? 1 : -1;
  const values = batch.header.groups.flatMap((group, p) => {
    const twin = sameGroup(other, p, group);
    return twin ? [sign * (solved(twin) - solved(groupOf(batch, p)))] : [];
  });
  const found = meanInterval(values);
  return note(
    found
      ? `Solve rate, B − A, over ${values.length} prompts that both batches have: ${interval(found)}; the second marks of a row are the other run's.`
      : "The other run's batch has other prompts.",
  );
}

function batchSummary(batch) {
  const {
      size: [P, G],
      updates,
    } = batch.header,
    total = batch.rollouts.length;
  const counts = Object.entries(KINDS).map(([kind, [, , words]]) => [
    kind,
    words,
    batch.rollouts.filter((r) => r.kind === kind).length,
  ]);
  return el(
    "p",
    { class: "summary" },
    `${P} prompts × ${G} rollouts, ${show(batch.arrays.token.length)} tokens`,
    updates.length ? `, first trained on in update ${updates[0]}` : "",
    " · ",
    counts
      .filter(([, , n]) => n)
      .map(([kind, words, n]) => [mark(kind), ` ${Math.round((100 * n) / total)} % ${words}  `]),
  );
}

async function batchView(run, number) {
  const batch = await loadBatch(run, number),
    other = await otherBatch(run, number);
  const list = el("div", { class: "rows" }),
    count = note();
  const update = () => {
    const groups = chosenGroups(batch);
    count.textContent = `${groups.length} of ${batch.header.groups.length} groups`;
    list.replaceChildren();
    appendLazily(list, groups.length, (i) => groupRow(run, batch, other, groups[i]), 40);
  };
  update();
  return [
    batchPicker(run, number),
    batchSummary(batch),
    other ? pairedPrompts(run, batch, other) : null,
    filterBar(batch, update),
    count,
    list,
  ];
}

// --- a group and its rollouts --------------------------------------------------------------------

function colourBar(batch) {
  const isStored = ({ of }) => !of || Boolean(batch.arrays[of]);
  if (!isStored(COLOURS[state.colour])) state.colour = "none";
  const { measured } = batch.header;
  // Measurements of before had no tokens.
  const absent = batch.arrays.ratio ? "the method has none" : "not measured";
  const why = (how) => (how.measured ? absent : "not stored");
  const options = Object.entries(COLOURS).map(([key, how]) => [
    key,
    isStored(how) ? how.title : `${how.title} — ${why(how)}`,
    !isStored(how),
  ]);
  const layers = batch.header.layers.map((layer, n) => [n, layer]);
  return el(
    "div",
    { class: "colours" },
    select("colour", state.colour, options, (key) => {
      state.colour = key;
      draw();
    }),
    state.colour === "expert"
      ? select("layer", state.layer, layers, (n) => {
          state.layer = Number(n);
          draw();
        })
      : null,
    legend(batch),
    COLOURS[state.colour].measured || !measured ? asMeasured(batch) : null,
  );
}

// For which update the measured colours stand.
function asMeasured({ header: { measured, updates, unread } }) {
  if (unread) return note("Ratio, entropy, coefficient and bounds are not shown: ", text(unread));
  if (!measured)
    return note("Ratio, entropy, coefficient and bounds: no update on this batch was measured.");
  const place = updates.length > 1 ? `, ${updates.indexOf(measured) + 1} of ${updates.length} on this batch` : "";
  return note(`measured before update ${measured}${place}`);
}

// The text of a token: several tokens may make one character, which the first of them shows.
function tokenText(batch, i) {
  const whole = batch.characters.get(i);
  if (whole) return whole[0];
  for (let before = 1; before < 4; before++) {
    const [, width] = batch.characters.get(i - before) ?? [];
    if (width > before) return "";
  }
  const known = batch.header.vocabulary[batch.arrays.token[i]];
  return batch.header.has_texts ? String(known) : `${known} `;
}

function tokenNode(batch, rollout, paint, i) {
  const shown = tokenText(batch, i);
  const node = el(
    "span",
    { class: batch.arrays.mask && !batch.arrays.mask[i] ? "t masked" : "t" },
    visible(shown),
  );
  if (shown.includes("\n")) node.prepend(el("span", { class: "newline" }, "⏎"));
  node.dataset.token = i;
  const colour = paint?.(i, rollout);
  if (colour) node.style.backgroundColor = colour;
  return node;
}

// The tokens of a rollout; those of a dialogue as a conversation, a bubble for each turn.
function tokensOf(batch, rollout) {
  const paint = painter(batch),
    { start, length } = rollout,
    turns = batch.arrays.turn;
  const box = el("div", { class: turns ? "tokens dialogue" : "tokens", dir: "ltr" });
  box.batch = batch;
  box.rollout = rollout;
  if (!turns) {
    appendLazily(box, length, (i) => tokenNode(batch, rollout, paint, start + i));
    return box;
  }
  const ends = [];
  for (let i = start; i < start + length; i++)
    if (i + 1 === start + length || turns[i + 1] !== turns[i]) ends.push(i + 1);
  appendLazily(
    box,
    ends.length,
    (n) => {
      const from = n ? ends[n - 1] : start,
        mine = turns[from] % 2 === 0;
      const score = batch.arrays.score?.[ends[n] - 1];
      const bubble = el(
        "div",
        { class: mine ? "turn policy" : "turn environment" },
        el(
          "b",
          { class: "who" },
          mine ? "policy" : "environment",
          Number.isFinite(score) ? ` · score ${show(score)}` : "",
        ),
      );
      appendLazily(bubble, ends[n] - from, (k) => tokenNode(batch, rollout, paint, from + k));
      return bubble;
    },
    20,
  );
  return box;
}

const FACTS = [
  ["advantage", "A"],
  ["coefficient", "coefficient"],
  ["lag", "lag"],
  ["version", "version"],
];
const KNOWN = [
  "completion",
  "outcome",
  "reward",
  "stopped",
  "turns",
  "garbled",
  "version",
  "extracted",
  "scores",
];

function facts(batch, rollout) {
  const { sample, length, start } = rollout;
  const found = [
    ["reward", show(sample.reward)],
    ["tokens", show(length)],
  ];
  for (const [name, words] of FACTS) {
    const read = reader(batch, name);
    const value = read?.(start, rollout);
    if (read && length && !(name === "lag" && value < 0)) found.push([words, show(value)]);
  }
  if (sample.extracted) found.push(["extracted", sample.extracted]);
  for (const [grader, score] of Object.entries(sample.scores ?? {})) found.push([grader, show(score)]);
  for (const [name, value] of Object.entries(sample)) {
    const isSaid = KNOWN.includes(name) || (name === "shaped_reward" && value === sample.reward);
    if (!isSaid) found.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
  }
  return el(
    "dl",
    { class: "facts" },
    found.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, text(value)))),
  );
}

function answerCard(run, batch, rollout, { open = false } = {}) {
  const { sample, group, place, kind } = rollout;
  const address = `#rollout/${run}/${batch.header.number}/${group}/${place}`;
  const words = `${letter(run)}${sample.outcome}${sample.stopped ? "" : ", truncated"}`;
  const link = open ? null : el("a", { href: address, title: "this rollout alone" }, `#${place}`);
  const plain = batch.header.has_texts
    ? null
    : el(
        "div",
        { class: "tokens" },
        text(sample.completion),
        note("The run's tokenizer could not be loaded: tokens below are ids."),
      );
  return el(
    "article",
    { class: open ? "answer open" : "answer", style: { "--kind": rgba(KINDS[kind][1]) } },
    el("h3", {}, mark(kind), words, link),
    facts(batch, rollout),
    plain,
    tokensOf(batch, rollout),
  );
}

function promptBox({ prompt, messages, as_read, answer, source, versions }) {
  const sampled = ` · source ${source} · versions ${versions.join(", ") || "of another run"}`;
  return el(
    "section",
    { class: "question" },
    el("h2", {}, "Prompt"),
    messages
      ? el("div", { class: "tokens dialogue" }, messages.map(messageNode))
      : el("div", { class: "tokens" }, text(prompt)),
    as_read
      ? el("details", {}, el("summary", {}, "as the model reads it"), el("div", { class: "tokens" }, text(as_read)))
      : null,
    note("reference: ", text(answer || "unknown", "code"), sampled),
  );
}

function crumbs(run, number, p) {
  const batch = el(
    "a",
    { href: `#batch/${run}/${number}`, title: "back (Esc)" },
    `${letter(run)}batch ${number}`,
  );
  const group =
    p === undefined ? "" : [" › ", el("a", { href: `#group/${run}/${number}/${p}` }, `group ${p}`)];
  return el("p", { class: "crumbs" }, batch, group);
}

// A message of a prompt: the policy's of an earlier turn, or another role's.
function messageNode({ role, content }) {
  const kind = role === "assistant" ? "policy" : "environment";
  return el("div", { class: `turn ${kind}` }, el("b", { class: "who" }, text(role)), text(content));
}

// Buttons to the group or rollout before and after this one, and the colours.
function stepper(what, number, batch) {
  return el(
    "div",
    { class: "picker" },
    button("‹", `${what} before (k)`, () => step(what, -1)),
    `${what} ${number}`,
    button("›", `next ${what} (j)`, () => step(what, 1)),
    colourBar(batch),
  );
}

async function groupView(run, number, p) {
  const batch = await loadBatch(run, number),
    other = await otherBatch(run, number);
  const group = batch.header.groups[p],
    twin = other && sameGroup(other, p, group);
  const cards = (r, of, rollouts) =>
    el(
      "div",
      { class: "answers" },
      byReward(rollouts).map((rollout) => answerCard(r, of, rollout)),
    );
  return [
    crumbs(run, number),
    stepper("group", p, batch),
    promptBox(group),
    cards(run, batch, groupOf(batch, p)),
    twin
      ? [el("h2", {}, `The same prompt in ${"AB"[1 - run]}`), cards(1 - run, other, twin)]
      : null,
  ];
}

// −log β of every token of a rollout, as bars; a click goes to the token.
function minimap(batch, rollout) {
  const { start, length } = rollout,
    values = batch.arrays.logprob;
  if (!values) return null;
  const plot = el("div", { class: "plot minimap", title: "−log β by place; click to go there" });
  drawLazily(plot, () => {
    const height = 56,
      [c, width] = canvasFor(plot, height),
      paint = painter(batch);
    const top = Math.max(1, most(values.slice(start, start + length).map((x) => -x)));
    c.clearRect(0, 0, width, height);
    const columns = Math.min(length, Math.floor(width)),
      size = length / columns;
    for (let k = 0; k < columns; k++) {
      let i = start + Math.floor(k * size);
      for (let j = i; j < start + Math.floor((k + 1) * size); j++) if (values[j] < values[i]) i = j;
      c.fillStyle = paint?.(i, rollout) || css("--faint");
      c.fillRect((k * width) / columns, 0, Math.max(1, width / columns - 0.3), height);
      c.fillStyle = css("--ink");
      const tall = Math.max(1, (-values[i] / top) * (height - 4));
      c.fillRect(
        (k * width) / columns,
        height - tall,
        Math.max(1, Math.min(4, width / columns - 0.3)),
        tall,
      );
    }
  });
  plot.addEventListener("click", (event) =>
    scrollToToken(start + Math.floor((event.offsetX / plot.clientWidth) * length)),
  );
  return plot;
}

function scrollToToken(i) {
  const find = () => document.querySelector(`.open [data-token="${i}"]`);
  for (let end; !find() && (end = document.querySelector(".open .sentinel"));) end.fill();
  find()?.scrollIntoView({ block: "center" });
  find()?.classList.add("found");
}

async function rolloutView(run, number, p, g) {
  const batch = await loadBatch(run, number),
    rollout = groupOf(batch, p)[g];
  return [
    crumbs(run, number, p),
    stepper("rollout", g, batch),
    promptBox(batch.header.groups[p]),
    minimap(batch, rollout),
    answerCard(run, batch, rollout, { open: true }),
  ];
}

// What is known of the token under the pointer.
function tip(event) {
  const node = event.target.closest?.(".t"),
    box = document.getElementById("tip");
  if (!node) {
    box.hidden = true;
    return;
  }
  const { batch, rollout } = node.closest(".tokens"),
    i = Number(node.dataset.token);
  const rows = [["place", String(i - rollout.start)]];
  for (const how of Object.values(COLOURS)) {
    const read = how.of && reader(batch, how.of);
    if (read) rows.push([how.title, show(read(i, rollout))]);
  }
  box.replaceChildren(el("b", {}, visible(JSON.stringify(tokenText(batch, i)))), table([], rows));
  box.hidden = false;
  const edge = (at, size, room) => Math.max(4, at + 14 + size > room ? at - size - 10 : at + 14);
  box.style.left = `${edge(event.clientX, box.offsetWidth, innerWidth)}px`;
  box.style.top = `${edge(event.clientY, box.offsetHeight, innerHeight)}px`;
}

// --- geometry ------------------------------------------------------------------------------------

function heatMap(part, run) {
  const { cosine, reward } = part.arrays,
    B = reward.length,
    G = part.header.size[1];
  const order = part.arrays[state.order];
  const plot = el("div", { class: "heat" }),
    reading = el(
      "output",
      { class: "reading" },
      "a pointer reads the cosine; a click opens the rollout of the row",
    );
  const canvas = el("canvas", {
    width: B,
    height: B,
    "aria-label": "cosines of the gradients of rollouts",
  });
  const pixels = new ImageData(B, B);
  for (let row = 0; row < B; row++) {
    for (let column = 0; column < B; column++) {
      const x = cosine[order[row] * B + order[column]];
      pixels.data.set(
        [...(x < 0 ? ORANGE : BLUE), Math.round(255 * Math.min(1, Math.abs(x)))],
        4 * (row * B + column),
      );
    }
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  const rewards = el("canvas", {
    class: "side",
    width: 1,
    height: B,
    title: "rewards in this order: blue above 0",
  });
  const side = new ImageData(1, B),
    top = largest(reward);
  order.forEach((i, row) =>
    side.data.set(
      [...(reward[i] > 0 ? BLUE : ORANGE), Math.round(60 + (195 * Math.abs(reward[i])) / top)],
      4 * row,
    ),
  );
  rewards.getContext("2d").putImageData(side, 0, 0);
  plot.append(rewards, canvas);
  const at = (event) =>
    [event.offsetY / canvas.clientHeight, event.offsetX / canvas.clientWidth].map(
      (x) => order[Math.max(0, Math.min(B - 1, Math.floor(x * B)))],
    );
  const name = (i) => `group ${Math.floor(i / G)} #${i % G} (reward ${show(reward[i])})`;
  canvas.addEventListener("pointermove", (event) => {
    const [i, j] = at(event);
    reading.textContent = `${name(i)} and ${name(j)}: cosine ${show(cosine[i * B + j])}`;
  });
  canvas.addEventListener("click", (event) => openRollout(run, part.header, at(event)[0]));
  return figure("Cosines of gradients", "orange −1, blue +1; left: reward", plot, reading);
}

function batchOfStep(run, step) {
  const { batches, updates } = state.summaries[run].header,
    at = updates.findIndex((those) => those.includes(step + 1));
  return at < 0 || !isHere(`${run}/batch/${batches[at]}`) ? null : batches[at];
}

function rolloutAddress(run, header, i) {
  const number = batchOfStep(run, header.step),
    G = header.size[1];
  return number === null ? null : `#rollout/${run}/${number}/${Math.floor(i / G)}/${i % G}`;
}

function openRollout(run, header, i) {
  const address = rolloutAddress(run, header, i);
  if (address) location.hash = address;
}

// The rollouts that take most from the update's squared norm, each with the one that it opposes most.
function cancelling(part, run) {
  const { part: shares, coefficient, reward, cosine, norm } = part.arrays,
    B = reward.length,
    G = part.header.size[1];
  if (!shares) return note("The weighted gradients add up to zero, or nothing weighs them.");
  const worst = [...shares.keys()]
    .filter((i) => shares[i] < 0)
    .sort((a, b) => shares[a] - shares[b])
    .slice(0, 12);
  const product = (i, j) => coefficient[i] * coefficient[j] * norm[i] * norm[j] * cosine[i * B + j];
  const opponent = (i) =>
    [...shares.keys()].reduce((a, b) => (product(i, b) < product(i, a) ? b : a));
  const cell = (i) => {
    const words = `group ${Math.floor(i / G)} #${i % G}`,
      address = rolloutAddress(run, part.header, i);
    return address ? el("a", { href: address }, words) : words;
  };
  const rows = worst.map((i) => {
    const j = opponent(i);
    return [
      cell(i),
      show(reward[i]),
      show(coefficient[i]),
      `${show(100 * shares[i])} %`,
      cell(j),
      show(cosine[i * B + j]),
    ];
  });
  const taking = shares.filter((x) => x < 0),
    lost = -100 * taking.reduce((sum, x) => sum + x, 0);
  return el(
    "section",
    {},
    el("h3", {}, "Rollouts that cancel"),
    note(
      `Share of a rollout: A (K A) over the update's squared norm. Those below 0, ${taking.length} of ${B}, take ${show(lost)} % of it away.`,
    ),
    table(["rollout", "reward", "coefficient", "share", "opposes most", "cosine"], rows),
  );
}

function geometryOf(part, run) {
  if (!part.header.usable) return note("The Gram matrix of this batch is zero or not finite.");
  const shares = [...part.arrays.share];
  const each = shares.filter((x) => x > 1e-7).map((x, i) => [i + 1, x]);
  let sum = 0;
  const added = shares.map((x, i) => [i + 1, (sum += x)]);
  const spectrum = chart("Spectrum", [{ label: "λ/Σλ", points: each, colour: BLUE }], {
    log: true,
    note: "share of each direction, logarithmic",
  });
  const cumulative = chart("Cumulative spectrum", [
    { label: "share of the first directions", points: added, colour: CATEGORIES[2] },
  ]);
  const right = el(
    "div",
    {},
    el("div", { class: "charts" }, spectrum, cumulative),
    cancelling(part, run),
  );
  return el("div", { class: "geometry" }, heatMap(part, run), right);
}

const GEOMETRY_CHARTS = [
  {
    title: "Participation ratio",
    names: ["geometry/participation_ratio", "geometry/group_participation_ratio"],
  },
  {
    title: "Effective rollouts, n_eff",
    names: ["geometry/effective_rollouts", "geometry/effective_rollouts_reweighted"],
  },
  { title: "Shared energy", names: ["geometry/shared_energy", "geometry/group_shared_energy"] },
];

const heldSteps = (run) =>
  state.summaries[run].header.geometry.filter((s) => isHere(`${run}/geometry/${s}`));

async function geometryView(run, number) {
  const steps = heldSteps(run),
    runs = runPicker(run, (r) => {
      location.hash = `#geometry/${r}`;
    });
  if (!steps.length)
    return [runs, note("No diagnostics ran: train with --config.diagnostics.every=10.")];
  const chosen = steps.includes(number) ? number : steps.at(-1);
  const shown = several() && heldSteps(1 - run).includes(chosen) ? [run, 1 - run] : [run];
  const found = await Promise.all(shown.map((r) => load(`${r}/geometry/${chosen}`)));
  const orders = [
    ["by_reward", "groups, best reward first"],
    ["by_vector", "leading eigenvector"],
  ];
  const columns = found.map((part, n) =>
    el(
      "div",
      {},
      shown.length > 1 ? el("h2", {}, "AB"[shown[n]]) : null,
      geometryOf(part, shown[n]),
    ),
  );
  return [
    el(
      "div",
      { class: "picker" },
      runs,
      select(
        "before update",
        chosen,
        steps.map((s) => [s, s + 1]),
        (s) => {
          location.hash = `#geometry/${run}/${s}`;
        },
      ),
      select("order", state.order, orders, (key) => {
        state.order = key;
        draw();
      }),
    ),
    el("div", { class: shown.length > 1 ? "beside" : "" }, columns),
    el("h3", {}, "Over the run"),
    el("div", { class: "charts" }, GEOMETRY_CHARTS.map(lineChart).filter(Boolean)),
  ];
}

// --- views, keys ---------------------------------------------------------------------------------

function place() {
  const [view = "run", ...numbers] = location.hash.slice(1).split("/");
  return { view: view || "run", numbers: numbers.map(Number) };
}

async function content({ view, numbers }) {
  const [run = 0, number, p, g] = numbers;
  if (!state.summaries[run]) return [note("There is no such run.")];
  if (view === "geometry") return geometryView(run, number);
  if (view === "run") return runView();
  const held = heldBatches(run),
    chosen = number ?? held.at(-1);
  if (!held.includes(chosen))
    return [batchPicker(run, chosen), note("This file does not hold the batch.")];
  const [P, G] = (await loadBatch(run, chosen)).header.size;
  if (p >= P || g >= G) return [note("The batch has no such rollout.")];
  if (view === "group") return groupView(run, chosen, p);
  return view === "rollout" ? rolloutView(run, chosen, p, g) : batchView(run, chosen);
}

let drawing = 0;
async function draw() {
  const mine = ++drawing,
    at = place(),
    main = document.getElementById("main");
  document.getElementById("tip").hidden = true;
  drawTabs(at);
  let nodes;
  try {
    nodes = await content(at);
  } catch (error) {
    nodes = [el("p", { class: "note error" }, visible(`This cannot be shown: ${error.message}`))];
  }
  if (mine !== drawing) return;
  main.replaceChildren(...nodes.flat(3).filter(Boolean));
  main.dataset.drawn = location.hash;
}

function drawTabs({ view }) {
  const batchTab = ["batch", "group", "rollout"].includes(view);
  const tabs = [
    ["run", "Run", view === "run"],
    ["batch", "Rollouts", batchTab],
    ["geometry", "Geometry", view === "geometry"],
  ];
  document
    .getElementById("tabs")
    .replaceChildren(
      ...tabs.map(([key, words, on]) =>
        el("a", { href: `#${key}`, "aria-current": on ? "page" : null }, words),
      ),
    );
  document
    .getElementById("where")
    .replaceChildren(
      ...visible(state.summaries.map((s) => s.header.name).join(" | ") + (SERVED ? " · live" : "")),
    );
}

// Goes to the next batch, group (in the chosen order) or rollout.
async function step(what, by) {
  const { view, numbers } = place(),
    [run = 0, number = heldBatches(run).at(-1), p, g] = numbers;
  if (what === "batch") {
    const here = heldBatches(run),
      next = here[here.indexOf(number) + by];
    if (next !== undefined) location.hash = `#batch/${run}/${next}`;
    return;
  }
  const batch = await loadBatch(run, number);
  if (what === "rollout" && view === "rollout") {
    const next = g + by;
    if (next >= 0 && next < batch.header.size[1])
      location.hash = `#rollout/${run}/${number}/${p}/${next}`;
    return;
  }
  const order = chosenGroups(batch).map((row) => row.p),
    next = order[order.indexOf(p) + by];
  if (next !== undefined) location.hash = `#group/${run}/${number}/${next}`;
}

// Goes to a place of the page; in a notebook's frame a browser would take it for one of the notebook.
function follow(event) {
  const link = event.target.closest?.("a[href^='#']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  location.hash = link.getAttribute("href");
}

const KEYS = [
  ["1 2 3", "run, rollouts, geometry"],
  ["[ ]", "earlier, later batch"],
  ["j k", "next group or rollout, the one before"],
  ["c", "next colour of tokens"],
  ["/", "search"],
  ["Enter", "open the first group"],
  ["Esc", "back"],
  ["?", "this list"],
];

function nextColour() {
  const options = [...document.querySelectorAll(".colours select option")].filter(
    (o) => !o.disabled && o.value in COLOURS,
  );
  if (!options.length) return;
  const at = options.findIndex((o) => o.value === state.colour);
  state.colour = options[(at + 1) % options.length].value;
  draw();
}

function back() {
  const { view, numbers } = place();
  if (view === "rollout") location.hash = `#group/${numbers.slice(0, 3).join("/")}`;
  else if (view === "group") location.hash = `#batch/${numbers.slice(0, 2).join("/")}`;
  else location.hash = "#run";
}

function onKey(event) {
  if (event.key === "Escape" && event.target.matches("input, select")) {
    event.target.blur();
    return;
  }
  if (
    event.target.matches("input, select, textarea") ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey
  )
    return;
  const { view } = place(),
    within = view === "rollout" ? "rollout" : "group";
  const actions = {
    1: () => {
      location.hash = "#run";
    },
    2: () => {
      location.hash = "#batch";
    },
    3: () => {
      location.hash = "#geometry";
    },
    "[": () => step("batch", -1),
    "]": () => step("batch", 1),
    j: () => step(within, 1),
    k: () => step(within, -1),
    c: nextColour,
    "/": () => document.getElementById("search")?.focus(),
    Escape: back,
    "?": help,
    Enter: () => view === "batch" && document.querySelector(".row")?.click(),
  };
  const action = actions[event.key];
  if (!action || document.getElementById("help").open) return;
  // On a link or a button, Enter is its own.
  if (event.key === "Enter" && event.target !== document.body) return;
  event.preventDefault();
  action();
}

function help() {
  const box = document.getElementById("help");
  box.replaceChildren(
    el("h2", {}, "Keys"),
    table(
      [],
      KEYS.map(([keys, words]) => [keys.split(" ").map((key) => el("kbd", {}, key)), words]),
    ),
    el("form", { method: "dialog" }, el("button", {}, "close")),
  );
  box.showModal();
}

// Loads the metrics of a served run again, and shows them where there are new ones.
async function reload() {
  const size = () =>
    JSON.stringify(state.summaries.map((s) => [s.header.batches, s.arrays["train|step"]?.length]));
  const before = size();
  await loadSummaries(true).catch(() => {}); // the server may have ended; what was loaded stays
  const isBusy = document.activeElement?.matches("input, select");
  if (before !== size() && place().view === "run" && !isBusy) draw();
}

async function loadSummaries(fresh = false) {
  const runs = [...Array(Number(document.body.dataset.runs)).keys()];
  state.summaries = await Promise.all(runs.map((run) => load(`${run}/summary`, { fresh })));
}

async function begin() {
  await loadSummaries();
  if (!SERVED) state.leftOut = await load("left_out");
  addEventListener("hashchange", () => {
    scrollTo(0, 0);
    draw();
  });
  addEventListener("keydown", onKey);
  DARK.addEventListener("change", draw);
  document.addEventListener("pointerover", tip);
  document.addEventListener("click", tip);
  document.addEventListener("click", follow);
  document.getElementById("help-button").addEventListener("click", help);
  if (SERVED) setInterval(() => document.visibilityState === "visible" && reload(), RELOAD_MS);
  await draw();
}

begin().catch((error) => {
  document
    .getElementById("main")
    .replaceChildren(
      el(
        "p",
        { class: "note error" },
        `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`,
      ),
    );
});
