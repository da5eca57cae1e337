"""A page that shows a run: its curves, its batches down to a token, the geometry of its gradients.

`read` has the facts of a run's folder, `write` the page that holds or serves them; `page.html`,
`page.css` and `page.js` draw it in a browser.
"""

__all__ = [
  "read",
  "write",
]
