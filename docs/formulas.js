// Formulas of the site: pymdownx.arithmatex marks them, KaTeX typesets them.
for (const place of document.querySelectorAll(".arithmatex")) {
  const marked = place.textContent.trim(); // \(…\) within a line, \[…\] between lines
  katex.render(marked.slice(2, -2), place, { displayMode: marked.startsWith("\\[") });
}
