// Tells site.css of each cell of a table the heading of its column, and whether it is a figure, as 0.17 [0.14, 0.20].
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const headings = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.textContent);
    for (const row of [...table.tBodies].flatMap((body) => [...body.rows])) {
      [...row.cells].forEach((cell, column) => {
        cell.dataset.heading = headings[column] ?? "";
        cell.classList.toggle("short", /^[0-9].{0,17}$/.test(cell.textContent));
      });
    }
  }
});
