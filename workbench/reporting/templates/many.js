// Pages about several runs: sort and filter tables, switch the theme, set figures beside a chosen baseline's.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);

  // ---- theme ----
  const theme = byId("theme");
  const themes = { "": ["Auto", "as the system has them"], light: ["Light", "light"], dark: ["Dark", "dark"] };
  theme?.addEventListener("click", () => {
    const names = Object.keys(themes);
    const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
    if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
    theme.textContent = themes[next][0];
    theme.setAttribute("aria-label", `Colours: ${themes[next][1]}`);
  });

  // ---- sorting: the order of a page without a click is the reader's first ----
  const keyOf = (cell) => {
    if (!cell) return null;
    const value = cell.dataset.v ?? cell.textContent.trim();
    if (value === "" || value === "–") return null;
    return cell.dataset.v === undefined || Number.isNaN(Number(value)) ? value : Number(value);
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [row, keyOf(row.cells[column])]);
        rows.sort(([, a], [, b]) => a === null || b === null ? (a === null) - (b === null) : down ? compare(b, a) : compare(a, b));
        body.append(...rows.map(([row]) => row));
      });
    });
  }

  // ---- filter ----
  const search = byId("search");
  if (search) {
    const shown = byId("shown");
    const rows = all("tr[data-run]");
    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        count += !row.hidden;
      }
      shown.textContent = `${count} of ${rows.length} runs`;
    };
    search.addEventListener("input", filter);
    filter();
  }

  // ---- baseline ----
  const choice = byId("baseline");
  if (choice) {
    const { settings, paired } = JSON.parse(byId("data").textContent);
    const cells = all("td[data-f]");
    const place = (cell, entry) => `${cell.closest("table").id} ${cell.dataset.f} ${entry}`;
    const first = new Map();
    for (const cell of cells) {
      const key = place(cell, cell.parentElement.dataset.entry);
      if (!first.has(key)) first.set(key, cell);
    }
    const runOf = (entry) => entry.split(".", 1)[0];
    const differing = (a, b, sameRun) => Object.keys({ ...a, ...b }).filter(
      (what) => (a[what] ?? null) !== (b[what] ?? null) || (!sameRun && (a[what] ?? null) === null));
    const said = (what, a, b) => (a[what] ?? null) === null || (b[what] ?? null) === null ? `${what} not recorded` : `other ${what}`;
    const rounded = (value, digits) => {
      const text = Math.abs(value).toFixed(digits);
      return (Number(text) === 0 ? "" : value < 0 ? "−" : "+") + text;
    };
    const beside = (cell, base) => {
      const entry = cell.parentElement.dataset.entry, d = cell.dataset;
      if (cell === base) return ["baseline", ""];
      const recorded = paired[`${base.parentElement.dataset.entry}|${entry}|${d.f}`];
      if (recorded) return [recorded, "paired"];
      const a = settings[d.s], b = settings[base.dataset.s];
      const unlike = differing(a, b, runOf(entry) === runOf(base.parentElement.dataset.entry));
      if (unlike.length) {
        const why = unlike.slice(0, 3).map((what) => said(what, a, b)).join(", ") + (unlike.length > 3 ? ", …" : "");
        return [`${d.kind === "ratio" ? "context" : "not compared"}: ${why}`, "context"];
      }
      const value = Number(d.v), other = Number(base.dataset.v);
      if (!Number.isFinite(value) || !Number.isFinite(other)) return ["", ""];
      if (d.kind === "ratio") return other === 0 ? ["", ""] : [`× ${(value / other).toFixed(2)}`, ""];
      return [`Δ ${rounded((value - other) * Number(d.scale), Number(d.digits))}${d.unit ? " " + d.unit : ""}`, ""];
    };
    const update = () => {
      const baseline = choice.value;
      for (const cell of cells) {
        const base = first.get(place(cell, baseline));
        const [text, kind] = base ? beside(cell, base) : ["", ""];
        const small = cell.querySelector(".against");
        small.textContent = text;
        small.className = `against ${kind}`;
      }
      for (const row of all("tr[data-entry]")) row.classList.toggle("baseline", row.dataset.entry === baseline);
      byId("said").textContent = `Baseline: ${choice.selectedOptions[0].textContent}`;
    };
    const named = decodeURIComponent(location.hash.replace(/^#baseline=/, ""));
    if ([...choice.options].some((option) => option.value === named)) choice.value = named;
    choice.addEventListener("change", () => {
      update();
      history.replaceState(null, "", `#baseline=${encodeURIComponent(choice.value)}`);
    });
    update();
  }
  for (const part of all("[data-script]")) part.hidden = false;
})();
