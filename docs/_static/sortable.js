/* A click on a column's head sorts a table of the class `sortable`; a second click reverses the order. The head is a
   button, so Tab and Enter do the same. Numbers sort by value, cells without a value come last. */
for (const table of document.querySelectorAll("table.sortable, .sortable table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const number = text => { const match = text.replaceAll(",", "").replace("−", "-").match(/^[<>≤≥≈~\s]*(-?\d+(\.\d+)?)/); return match && +match[1]; };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = head.ariaSort === "ascending" ? -1 : 1;
      const text = row => row.cells[column].textContent.trim();
      const compare = (a, b) => {
        if (/^[-–]?$/.test(a) || /^[-–]?$/.test(b)) return way * (/^[-–]?$/.test(a) - /^[-–]?$/.test(b));
        const [x, y] = [number(a), number(b)];
        return x !== null && y !== null && x !== y ? x - y : a.localeCompare(b, undefined, { numeric: true });
      };
      body.append(...[...body.rows].sort((a, b) => way * compare(text(a), text(b))));
      for (const other of heads) other.ariaSort = other === head ? (way > 0 ? "ascending" : "descending") : null;
    });
  });
}
