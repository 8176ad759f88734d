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

  // Legends: a click hides or shows a series in every picture of the same section.
  all(".legend button").forEach((button) => {
    const own = button.closest("figure") || button.closest("section") || document;
    button.addEventListener("click", () => {
      const off = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!off));
      all(`g.series[data-series="${button.dataset.series}"]`, own)
        .forEach((group) => group.classList.toggle("off", off));
    });
  });

  // A line goes through the marks that are left; those beside the axis never were on it.
  const redraw = (group) => {
    const line = group.querySelector("path.join");
    if (!line) return;
    const places = all("g[data-tip]:not([hidden]) > path.mark:not(.open)", group)
      .map((mark) => mark.getAttribute("transform").match(/-?[\d.]+/g).join(" "));
    line.setAttribute("d", places.length > 1 ? `M${places.join("L")}` : "");
  };

  // Filters: rows of tables and marks of pictures that have all the words, and none after a minus.
  all(".filtered").forEach((part) => {
    const field = part.querySelector("input");
    const told = part.querySelector("output");
    const things = all("tbody tr, svg g[data-tip], .frontier li", part).map((thing) =>
      [thing, (thing.dataset.tip || thing.textContent).toLowerCase()]);
    const rows = all("table", part)[0].tBodies[0].rows;
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
      const fits = (text) => words.every((word) =>
        word.startsWith("-") ? !text.includes(word.slice(1)) : text.includes(word));
      things.forEach(([thing, text]) => thing.toggleAttribute("hidden", !fits(text)));
      all("g.series", part).forEach(redraw);
      const left = [...rows].filter((row) => !row.hasAttribute("hidden")).length;
      told.textContent = words.length ? `${left} of ${rows.length} rows` : "";
    });
  });

  // Commands: a button that copies, or where that is not allowed selects.
  all(".command").forEach((part) => {
    const button = part.querySelector("button");
    const code = part.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(code);
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected";
      }
    });
  });

  // Tips: the text of data-tip next to the pointer, or of the mark the arrow keys are at.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);
  const hide = () => { tip.hidden = true; };
  const show = (owner, x, y) => {
    tip.hidden = false;
    tip.textContent = owner.dataset.tip;
    tip.style.left = "0px";
    const box = tip.getBoundingClientRect();
    const left = Math.min(x + 14, innerWidth - box.width - 8);
    const above = y - box.height - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : y + 18}px`;
  };
  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest("[data-tip]");
    if (owner) show(owner, event.clientX, event.clientY); else hide();
  });
  document.addEventListener("scroll", hide, true);
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  all("svg.chart").forEach((chart) => {
    let at = -1;
    chart.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      if (!(event.key in step)) return;
      const marks = all(".series:not(.off)[data-tip], .series:not(.off) [data-tip]", chart)
        .filter((mark) => !mark.hasAttribute("hidden"));
      if (!marks.length) return;
      event.preventDefault();
      all(".here", chart).forEach((mark) => mark.classList.remove("here"));
      at = (Math.max(at, step[event.key] > 0 ? -1 : 0) + step[event.key] + marks.length)
        % marks.length;
      marks[at].classList.add("here");
      const box = marks[at].getBoundingClientRect();
      show(marks[at], box.x + box.width / 2, box.y);
    });
    chart.addEventListener("blur", () => {
      all(".here", chart).forEach((mark) => mark.classList.remove("here"));
      at = -1;
      hide();
    });
  });
})();
