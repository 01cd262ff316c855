// Part 2: every matrix of a pair. Columns arrive as quantized integers in one compressed stream (reporting/columns.py);
// the table draws only the rows in view, so 70,000 of them cost what 30 do.

class Tensors {
  constructor(data, raw) {
    Object.assign(this, { rows: data.rows, metrics: data.metrics, projections: data.projections });
    this.column = {};
    let at = 0;
    for (const { name, step, first, width } of data.columns) {
      const values = new Float64Array(this.rows);
      const top = 2 ** (8 * width) - 1;
      const scale = Math.round(1 / step); // multiples of 0.01 divide by 100: exact to the last digit
      for (let i = 0; i < this.rows; i++) {
        const code = width === 1 ? raw[at + i] : raw[at + i] | (raw[at + this.rows + i] << 8);
        if (code === top) values[i] = NaN;
        else if (code === top - 1) values[i] = Infinity;
        else if (code === top - 2) values[i] = -Infinity;
        else values[i] = step < 1 ? (code + first) / scale : (code + first) * step;
      }
      at += width * this.rows;
      this.column[name] = values;
    }
    this.patterns = data.patterns;
    this.exceptions = new Map();
    let exception = 0;
    if (data.exceptions.length)
      this.column.pattern.forEach((code, i) => code === 255 && this.exceptions.set(i, data.exceptions[exception++]));
  }

  static async read(data) {
    const text = atob(data.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Tensors(data, new Uint8Array(await new Response(stream).arrayBuffer()));
  }

  name(i) {
    const whole = this.exceptions.get(i);
    if (whole !== undefined) return whole;
    const { pattern, layer, expert } = this.column;
    return this.patterns[pattern[i]].replaceAll("{L}", layer[i]).replaceAll("{E}", expert[i]);
  }

  names() {
    this.allNames ??= Array.from({ length: this.rows }, (_, i) => this.name(i));
    return this.allNames;
  }

  text(metric, i, unit = false) {
    return Tensors.print(this.column[metric.key][i], metric, unit);
  }

  static print(value, { digits, unit }, withUnit = false) {
    if (Number.isNaN(value)) return "–";
    let text = Number.isFinite(value) ? value.toFixed(digits) : value > 0 ? "∞" : "-∞";
    if (Number(text) === 0) text = text.replace("-", "");
    return text.replace("-", "−") + (withUnit && unit ? ` ${unit}` : "");
  }
}

class Grid {
  static ROW = 28;
  static HEAD = 46;
  static PRINTED = 8; // columns that fit on paper

  constructor(root, tensors, pair) {
    Object.assign(this, { root, tensors, pair, box: root.querySelector(".grid"), drawn: new Map(), chosen: -1 });
    this.columns = [
      { key: "name", short: "tensor", label: "tensor" },
      { key: "layer", short: "layer", label: "layer", digits: 0, unit: "" },
      { key: "expert", short: "expert", label: "expert", digits: 0, unit: "" },
      ...tensors.metrics,
    ];
    this.active = { row: -1, column: 0 };
    this.sort = { key: tensors.metrics[0]?.key ?? "layer", descending: false };
    this.template = `minmax(min(24rem, 60vw), 2fr) 4rem 4.4rem repeat(${tensors.metrics.length}, minmax(5.4rem, 1fr))`;
    this.width = `calc(min(24rem, 60vw) + ${4 + 4.4 + 5.4 * tensors.metrics.length}rem)`;
    this.spacer = page.make("div", { className: "spacer", role: "presentation" });
    this.header = this.makeRow("head row", "columnheader", (column) => column.short + (column.unit ? `, ${column.unit}` : ""));
    this.header.style.position = "sticky";
    this.header.setAttribute("aria-rowindex", 1);
    this.box.setAttribute("aria-colcount", this.columns.length);
    this.box.append(this.header, this.spacer);
    this.listen();
    this.filter();
  }

  makeRow(className, role, text) {
    const row = page.make("div", { className, role: "row" });
    row.style.gridTemplateColumns = this.template;
    row.style.width = `max(100%, ${this.width})`;
    this.columns.forEach((column, c) => {
      const cell = page.make("div", { className: "cell", role, tabIndex: -1 }, text(column));
      cell.title = role === "columnheader" ? column.label : column.key === "name" ? cell.textContent : "";
      cell.setAttribute("aria-colindex", c + 1);
      row.append(cell);
    });
    return row;
  }

  listen() {
    const control = (name) => this.root.querySelector(`.${name}`);
    this.controls = { search: control("search"), projection: control("projection"), layer: control("layer"), expert: control("expert") };
    for (const name of this.tensors.projections) this.controls.projection.append(page.make("option", { value: name }, name));
    for (const input of Object.values(this.controls)) input.addEventListener("input", () => this.filter());
    control("copy").addEventListener("click", (event) => page.copy(this.csv(), event.currentTarget));
    this.box.addEventListener("scroll", () => this.draw(), { passive: true });
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("click", (event) => {
      const cell = event.target.closest(".cell");
      if (!cell) return;
      const row = Number(cell.parentElement.getAttribute("aria-rowindex")) - 2;
      this.focus(row, [...cell.parentElement.children].indexOf(cell));
      this.enter();
    });
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
    page.resized(this.box, () => this.draw());
  }

  filter() {
    const { column, rows, projections } = this.tensors;
    const within = (input) => {
      const found = input.value.trim().match(/^(-?\d+)(?:\s*[-–]\s*(\d+))?$/);
      return found ? [Number(found[1]), Number(found[2] ?? found[1])] : null;
    };
    const [layer, expert] = [within(this.controls.layer), within(this.controls.expert)];
    const projection = projections.indexOf(this.controls.projection.value);
    const words = this.controls.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const names = words.length ? this.tensors.names() : null;
    const kept = [];
    for (let i = 0; i < rows; i++) {
      if (layer && (column.layer[i] < layer[0] || column.layer[i] > layer[1])) continue;
      if (expert && (column.expert[i] < expert[0] || column.expert[i] > expert[1])) continue;
      if (projection >= 0 && column.projection[i] !== projection) continue;
      if (names && !words.every((word) => names[i].toLowerCase().includes(word))) continue;
      kept.push(i);
    }
    this.kept = kept;
    this.order();
  }

  order() {
    const { key, descending } = this.sort;
    if (key === "name") {
      const names = this.tensors.names();
      this.kept.sort((a, b) => page.compare(names[a], names[b], descending) || a - b);
    } else {
      const values = this.tensors.column[key]; // what was not measured comes last; the rest compares as bare numbers
      const measured = this.kept.filter((i) => !Number.isNaN(values[i]));
      const sign = descending ? -1 : 1;
      measured.sort((a, b) => sign * (values[a] - values[b]) || a - b);
      this.kept = measured.concat(this.kept.filter((i) => Number.isNaN(values[i])));
    }
    [...this.header.children].forEach((cell, c) => {
      const sorted = this.columns[c].key === key;
      cell.setAttribute("aria-sort", sorted ? (descending ? "descending" : "ascending") : "none");
    });
    this.root.querySelector(".count").textContent =
      `${this.kept.length.toLocaleString("en")} of ${this.tensors.rows.toLocaleString("en")} matrices, ` +
      `by ${this.columns.find((c) => c.key === key).short}, ${descending ? "highest" : "lowest"} first`;
    this.box.setAttribute("aria-rowcount", this.kept.length + 1);
    this.spacer.style.height = `${this.kept.length * Grid.ROW}px`;
    this.active.row = Math.min(this.active.row, this.kept.length - 1);
    this.clear();
    this.draw();
  }

  clear() {
    this.drawn.forEach((row) => row.remove());
    this.drawn.clear();
  }

  draw() {
    if (this.printing) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / Grid.ROW) - 4);
    const last = Math.min(this.kept.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / Grid.ROW) + 4);
    const wanted = new Set(Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i));
    if (this.active.row >= 0) wanted.add(this.active.row); // the focused row stays, or the keyboard would be lost
    for (const [at, row] of this.drawn) {
      if (!wanted.has(at)) {
        row.remove();
        this.drawn.delete(at);
      }
    }
    for (const at of wanted) if (!this.drawn.has(at)) this.drawRow(at);
    this.mark();
  }

  drawRow(at) {
    const i = this.kept[at];
    const row = this.makeRow("row", "gridcell", (column) => {
      if (column.key === "name") return this.tensors.name(i);
      const value = this.tensors.column[column.key][i];
      return column.digits === 0 && value < 0 ? "–" : Tensors.print(value, column);
    });
    row.style.top = `${Grid.HEAD + at * Grid.ROW}px`;
    row.setAttribute("aria-rowindex", at + 2);
    row.classList.toggle("chosen", i === this.chosen);
    this.box.append(row);
    this.drawn.set(at, row);
  }

  mark() {
    for (const cell of this.box.querySelectorAll('.cell[tabindex="0"]')) cell.tabIndex = -1;
    const row = this.active.row < 0 ? this.header : this.drawn.get(this.active.row);
    if (row) row.children[this.active.column].tabIndex = 0;
  }

  move(event) {
    const page_ = Math.floor(this.box.clientHeight / Grid.ROW) - 2;
    const end = this.kept.length - 1;
    let { row, column } = this.active;
    const steps = {
      ArrowDown: () => row++, ArrowUp: () => row--, ArrowRight: () => column++, ArrowLeft: () => column--,
      PageDown: () => (row += page_), PageUp: () => (row = Math.max(row - page_, 0)),
      Home: () => (event.ctrlKey ? (row = 0) : (column = 0)),
      End: () => (event.ctrlKey ? (row = end) : (column = this.columns.length - 1)),
    };
    if (event.key === "Enter" || event.key === " ") this.enter();
    else if (steps[event.key]) steps[event.key]();
    else return;
    event.preventDefault();
    if (steps[event.key]) this.focus(row, column);
  }

  focus(row, column) {
    row = Math.max(-1, Math.min(row, this.kept.length - 1));
    this.active = { row, column: Math.max(0, Math.min(column, this.columns.length - 1)) };
    const top = row * Grid.ROW;
    if (row >= 0 && top < this.box.scrollTop) this.box.scrollTop = top;
    const room = this.box.clientHeight - Grid.HEAD - Grid.ROW;
    if (row >= 0 && top > this.box.scrollTop + room) this.box.scrollTop = top - room;
    this.draw();
    const cells = (row < 0 ? this.header : this.drawn.get(row)).children;
    cells[this.active.column].focus({ preventScroll: true });
    cells[this.active.column].scrollIntoView({ block: "nearest", inline: "nearest", container: "nearest", behavior: "instant" });
  }

  enter() {
    const { row, column } = this.active;
    if (row >= 0) return this.choose(this.kept[row]);
    const { key } = this.columns[column];
    this.sort = { key, descending: this.sort.key === key && !this.sort.descending };
    this.order();
  }

  choose(i) {
    this.chosen = i;
    this.drawn.forEach((row, at) => row.classList.toggle("chosen", this.kept[at] === i));
    history.replaceState(null, "", `#tensor-${this.pair}:${encodeURIComponent(this.tensors.name(i))}`);
  }

  // Show one matrix: filters give way where they hide it.
  find(i) {
    if (!this.kept.includes(i)) {
      for (const input of Object.values(this.controls)) input.value = "";
      this.filter();
    }
    this.choose(i);
    this.root.scrollIntoView({ block: "center", behavior: "instant" });
    this.focus(this.kept.indexOf(i), 0);
  }

  csv() {
    const quote = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const safe = (text) => (/^[=+@\t\r-]/.test(text) ? `'${text}` : text); // no name is a formula
    const lines = this.kept.map((i) =>
      this.columns.map((c) => {
        if (c.key === "name") return quote(safe(this.tensors.name(i)));
        const value = this.tensors.column[c.key][i];
        return Number.isFinite(value) ? value.toFixed(c.digits) : String(value);
      }).join(","),
    );
    return [this.columns.map((c) => c.key).join(","), ...lines].join("\n") + "\n";
  }

  // On paper there is no scrolling: the first rows of the order chosen, and the first columns.
  print(on) {
    this.printing = false;
    this.clear();
    if (on) {
      for (let at = 0; at < Math.min(40, this.kept.length); at++) this.drawRow(at);
      this.printing = true;
      for (const row of [this.header, ...this.drawn.values()]) {
        row.style.width = "100%";
        row.style.gridTemplateColumns = "minmax(0, 5fr) repeat(2, minmax(0, .7fr)) repeat(5, minmax(0, 1fr))";
        [...row.children].forEach((cell, c) => (cell.hidden = c >= Grid.PRINTED));
      }
    } else {
      this.header.style.width = `max(100%, ${this.width})`;
      this.header.style.gridTemplateColumns = this.template;
      [...this.header.children].forEach((cell) => (cell.hidden = false));
      this.draw();
    }
  }
}
