"""A page that shows a run: its curves, its batches down to a token, the geometry of its gradients.

`read` reads a run's folder, and `write` writes or serves the page; `page.html`, `page.css` and
`page.js` draw it in a browser.
"""

__all__ = [
  "read",
  "write",
]
