// The page's own script, part 1: theme, anchors, sortable and filterable tables, copying, printing. No dependency, no
// network; everything that it writes into the page is text (textContent), never markup. Without it the page still reads.
"use strict";

const page = {
  make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element && name !== "role") element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  },
  // A printed figure as a number: true minus signs, units of size and time, "–" for what was not measured.
  figure(text) {
    const plain = text.trim().replace(/−/g, "-").replace(/,/g, "");
    if (/^[-+]?∞/.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
    if (/\d (min|h)\b/.test(plain)) {
      let seconds = 0;
      for (const [, n, unit] of plain.matchAll(/([\d.]+) (h|min|s)\b/g)) seconds += n * { h: 3600, min: 60, s: 1 }[unit];
      return seconds;
    }
    const found = plain.match(/^<?([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*(KiB|MiB|GiB|TiB)?/);
    if (!found) return NaN;
    const power = { KiB: 1, MiB: 2, GiB: 3, TiB: 4 }[found[2]] ?? 0;
    return Number(found[1]) * 1024 ** power;
  },
  compare(a, b, descending) {
    const missing = (v) => v === "" || Number.isNaN(v);
    if (missing(a) || missing(b)) return missing(a) - missing(b); // what was not measured comes last, both ways
    const order = typeof a === "number" ? a - b || 0 : a.localeCompare(b, "en", { numeric: true });
    return descending ? -order : order;
  },
  color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  },
  async copy(text, button) {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = page.make("textarea", { value: text });
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    const label = button.textContent;
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = label), 1500);
  },
  open(element) {
    for (let at = element; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  },
  // Redraws in the frame after the element's size has changed: what is drawn within the observer's own call can change
  // sizes again, of which the browser then logs an error.
  resized(element, redraw) {
    let frame = 0;
    new ResizeObserver(([entry]) => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => redraw(entry.contentRect.width));
    }).observe(element);
  },
  redraws: [], // called when the theme changes
};

// ---- theme ----
(() => {
  const button = document.getElementById("theme");
  const modes = ["auto", "light", "dark"];
  const remember = (mode) => {
    try {
      localStorage.setItem("workbench-theme", mode);
    } catch {} // storage may be closed to files
  };
  const recall = () => {
    try {
      return localStorage.getItem("workbench-theme");
    } catch {
      return null;
    }
  };
  let mode = modes.includes(recall()) ? recall() : "auto";
  const apply = () => {
    if (mode === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = mode;
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[mode];
    button.setAttribute("aria-label", `Colours: ${mode === "auto" ? "as the system has them" : mode}. Change.`);
    page.redraws.forEach((redraw) => redraw());
  };
  button.addEventListener("click", () => {
    mode = modes[(modes.indexOf(mode) + 1) % modes.length];
    remember(mode);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
})();

// ---- anchors and the list of sections ----
(() => {
  for (const heading of document.querySelectorAll("main :is(h2, h3, h4)")) {
    const id = heading.id.startsWith("h-") ? heading.closest("section")?.id : heading.id;
    if (id) heading.append(page.make("a", { className: "anchor", href: `#${id}`, ariaLabel: "Link to this place" }, "#"));
  }
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.getAttribute("href").slice(1), a]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((e) => e.isIntersecting)) {
        links.forEach((a) => a.removeAttribute("aria-current"));
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-15% 0px -75% 0px" },
  );
  document.querySelectorAll("main > section").forEach((section) => seen.observe(section));
  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    page.open(target);
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  if (location.hash) follow();
})();

// ---- tables ----
(() => {
  const own = (cell) => [...cell.childNodes].find((n) => n.textContent.trim())?.textContent.trim() ?? "";
  for (const table of document.querySelectorAll("main .scroll table")) {
    const body = table.tBodies[0];
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
    if (heads.length < 2 || body.rows.length < 2) continue;
    heads.forEach((head, column) => {
      const button = page.make("button", { type: "button" });
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const numeric = head.classList.contains("n");
        const keyed = [...body.rows].map((row) => {
          const text = row.cells[column] ? own(row.cells[column]) : "";
          return [numeric ? page.figure(text) : text, row];
        });
        keyed.sort((a, b) => page.compare(a[0], b[0], descending));
        body.append(...keyed.map(([, row]) => row));
      });
    });
    if (body.rows.length < 12) continue;
    const status = page.make("span", { className: "muted", role: "status" });
    const input = page.make("input", { type: "search", placeholder: "part of a row", autocomplete: "off" });
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      status.textContent = words.length ? `${shown} of ${body.rows.length} rows` : "";
    });
    const label = page.make("label", {}, "Filter ", input);
    table.closest(".scroll").before(page.make("div", { className: "filter" }, label, " ", status));
  }
})();

// ---- copying and printing ----
(() => {
  for (const box of document.querySelectorAll(".copyable")) {
    const button = page.make("button", { type: "button" }, "Copy");
    button.addEventListener("click", () => page.copy(box.querySelector("pre").textContent, button));
    box.append(button);
  }
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => (details.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((details) => (details.open = false)));
  document.querySelectorAll("[data-script]").forEach((element) => {
    if (!element.dataset.pair) element.hidden = false;
  });
})();
