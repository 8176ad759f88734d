"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Tables: a click sorts by that column, another turns it round; empty cells stay at the end.
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const missing = (value) => value === "" || value === "–";
  const sort = (table, column) => {
    const heads = all("th", table);
    const up = heads[column].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [key(row, column), row]);
    rows.sort(([a], [b]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const order = typeof a === "number" && typeof b === "number"
        ? (a < b ? -1 : Number(a > b))
        : String(a).localeCompare(String(b), "en", { numeric: true });
      return up ? order : -order;
    });
    body.append(...rows.map(([, row]) => row));
  };
  all("table.sortable").forEach((table) => all("th", table).forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, column));
  }));

  // Legends: a click hides or shows a series.
  all("figure").forEach((figure) => all(".legend button", figure).forEach((button) => {
    button.addEventListener("click", () => {
      const off = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!off));
      all(`g.series[data-series="${button.dataset.series}"]`, figure)
        .forEach((group) => group.classList.toggle("off", off));
    });
  }));

  // Tips: the text of data-tip next to the pointer.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest("[data-tip]");
    tip.hidden = !owner;
    if (!owner) return;
    tip.textContent = owner.dataset.tip;
    tip.style.left = "0px";
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const above = event.clientY - box.height - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);
})();
