// Part 3: layer x expert maps on canvas, one per projection, with one scale; and the start of parts 2 and 3.

class HeatMaps {
  static SEQUENTIAL = ["#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725"];
  static CYCLIC = ["#e2d9e2", "#a5bfcb", "#6583bd", "#5b3a9b", "#2f1436", "#7c2450", "#b45a50", "#d0ad9c", "#e2d9e2"];
  static STEPS = 255;
  static USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

  constructor(root, tensors, find) {
    Object.assign(this, { root, tensors, find, maps: [] });
    this.select = root.querySelector(".metric");
    this.sorting = root.querySelector(".sorting");
    for (const metric of tensors.metrics) {
      const label = metric.label + (metric.unit ? `, ${metric.unit}` : "");
      this.select.append(page.make("option", { value: metric.key }, label));
    }
    this.readout = root.querySelector(".readout");
    this.tip = document.getElementById("tip");
    this.groups = this.group();
    this.sorting.closest("label").hidden = !this.groups.some((group) => group.experts);
    this.select.addEventListener("input", () => this.draw());
    this.sorting.addEventListener("input", () => this.draw());
    let width = 0;
    page.resized(root, (now) => {
      if (now === width) return;
      width = now;
      this.draw();
    });
    page.redraws.push(() => this.draw());
  }

  // What is not routed in one map (layer x projection), then a map per projection of the routed experts.
  group() {
    const { layer, expert, projection, shared } = this.tensors.column;
    const groups = new Map();
    for (let i = 0; i < this.tensors.rows; i++) {
      const routed = expert[i] >= 0;
      const of = this.tensors.projections[projection[i]];
      const title = routed ? of : "not routed";
      if (!groups.has(title)) groups.set(title, { title, experts: routed, cells: [] });
      groups.get(title).cells.push({ i, row: layer[i], column: routed ? expert[i] : of + (shared[i] ? ", shared" : "") });
    }
    const rank = (g) => (g.experts ? (HeatMaps.USUAL.indexOf(g.title) + 100) % 100 : 100);
    for (const group of groups.values()) {
      group.rows = [...new Set(group.cells.map((c) => c.row))].sort((a, b) => a - b);
      group.columns = [...new Set(group.cells.map((c) => c.column))];
      const place = (name) => `${name.endsWith(", shared")}${String(HeatMaps.USUAL.indexOf(name.replace(", shared", ""))).padStart(3)}${name}`;
      group.columns.sort((a, b) => (group.experts ? a - b : place(a).localeCompare(place(b))));
    }
    return [...groups.values()].sort((a, b) => rank(a) - rank(b) || a.title.localeCompare(b.title));
  }

  range(metric) {
    if (metric.scale === "octave") return [0, 1, false, false];
    const finite = Float64Array.from(this.tensors.column[metric.key].filter(Number.isFinite)).sort();
    if (!finite.length) return [0, 1, false, false];
    const at = (share) => finite[Math.round(share * (finite.length - 1))];
    if (metric.scale === "zero") {
      const most = Math.max(Math.abs(at(0.01)), Math.abs(at(0.99))) || 1;
      return [-most, most, finite[0] < -most, finite[finite.length - 1] > most];
    }
    return [at(0.01), at(0.99), finite[0] < at(0.01), finite[finite.length - 1] > at(0.99)];
  }

  // Colours as [red, green, blue], from the lowest to the highest value.
  palette(scale) {
    const stops = { up: HeatMaps.SEQUENTIAL, octave: HeatMaps.CYCLIC, zero: ["#2b6cb8", page.color("--middle"), "#d0650a"] }[scale];
    return Array.from({ length: HeatMaps.STEPS + 1 }, (_, step) => {
      const at = (step / HeatMaps.STEPS) * (stops.length - 1);
      const [low, high] = [HeatMaps.rgb(stops[Math.floor(at)]), HeatMaps.rgb(stops[Math.ceil(at)])];
      return low.map((v, c) => Math.round(v + (high[c] - v) * (at % 1)));
    });
  }

  static rgb(hex) {
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }

  draw() {
    this.metric = this.tensors.metrics.find((m) => m.key === this.select.value);
    const [low, high, below, above] = this.range(this.metric);
    const colors = this.palette(this.metric.scale);
    const values = this.tensors.column[this.metric.key];
    const none = HeatMaps.rgb(page.color("--none"));
    this.colorOf = (i) => {
      const value = values[i];
      if (Number.isNaN(value)) return none;
      const at = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0.5;
      return colors[Math.round(at * HeatMaps.STEPS)];
    };
    const bar = this.root.querySelector(".colorbar");
    bar.querySelector(".low").textContent = (below ? "≤ " : "") + Tensors.print(low, this.metric);
    bar.querySelector(".high").textContent = (above ? "≥ " : "") + Tensors.print(high, this.metric);
    bar.querySelector(".unit").textContent = `${this.metric.unit || "no unit"}; grey: not measured`;
    const strip = bar.querySelector("canvas").getContext("2d");
    colors.forEach((color, step) => {
      strip.fillStyle = `rgb(${color})`;
      strip.fillRect((step * 220) / colors.length, 0, 220 / colors.length + 1, 10);
    });
    const box = this.root.querySelector(".maps");
    const focused = this.maps.findIndex((map) => map.canvas === document.activeElement);
    this.maps.forEach((map) => map.element.remove());
    this.maps = this.groups.map((group) => new HeatMap(this, group, this.root.clientWidth));
    box.append(...this.maps.map((map) => map.element));
    if (focused >= 0) this.maps[focused].canvas.focus();
  }

  describe(i) {
    const figures = this.tensors.metrics.map((m) => `${m.short} ${this.tensors.text(m, i, true)}`);
    return [this.tensors.name(i), figures];
  }

  show(i, x, y) {
    const [name, figures] = this.describe(i);
    this.readout.replaceChildren(page.make("b", {}, name), page.make("br"), figures.join(" · "));
    this.tip.hidden = x === null;
    if (x === null) return;
    this.tip.textContent = `${name}\n${this.metric.short} ${this.tensors.text(this.metric, i, true)}`;
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.tip.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  }

  hide() {
    this.tip.hidden = true;
  }
}

class HeatMap {
  constructor(owner, group, room) {
    Object.assign(this, { owner, group, cursor: null });
    this.columns = this.order();
    this.left = 30;
    this.below = group.experts ? 18 : 92;
    const wide = group.columns.length > 24 ? room - this.left - 16 : Math.min(room, 340) - this.left - 8;
    this.cell = Math.max(2, Math.min(22, Math.floor(wide / group.columns.length)));
    this.tall = Math.max(4, Math.min(18, Math.floor(420 / group.rows.length), Math.max(this.cell, 8)));
    const width = Math.max(this.left + this.cell * this.columns.length + 8, group.experts ? 0 : 110);
    const height = this.tall * group.rows.length + this.below;
    const label = `Heat map, ${group.title}: ${group.rows.length} layers by ${this.columns.length} ` +
      `${group.experts ? "experts" : "projections"}, ${owner.metric.label}. Arrow keys move.`;
    this.canvas = page.make("canvas", { tabIndex: 0, role: "img", ariaLabel: label });
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    this.paint();
    this.element = page.make("div", { className: "map" }, page.make("h5", {}, group.title), page.make("div", { className: "scroll" }, this.canvas));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", () => this.cursor && this.cursor.i !== undefined && this.owner.readout.scrollIntoView({ block: "nearest" }));
    this.canvas.addEventListener("dblclick", () => this.cursor?.i !== undefined && this.owner.find(this.cursor.i));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.leave());
  }

  order() {
    const { group, owner } = this;
    if (!group.experts || owner.sorting.value === "number") return group.columns;
    const values = owner.tensors.column[owner.metric.key];
    const sums = new Map(group.columns.map((column) => [column, [0, 0]]));
    for (const { i, column } of group.cells) {
      if (!Number.isFinite(values[i])) continue;
      const sum = sums.get(column);
      sum[0] += owner.metric.scale === "zero" ? -Math.abs(values[i]) : values[i];
      sum[1] += 1;
    }
    const mean = (column) => sums.get(column)[0] / (sums.get(column)[1] || NaN);
    return [...group.columns].sort((a, b) => page.compare(mean(a), mean(b), false));
  }

  paint() {
    const { context, group, cell, tall, left } = this;
    const place = new Map(this.columns.map((column, x) => [column, x]));
    const rows = new Map(group.rows.map((row, y) => [row, y]));
    const [width, height] = [this.columns.length, group.rows.length];
    this.at = new Map();
    const pixels = new ImageData(width, height); // a pixel a cell, then scaled: 70,000 cells in one step
    for (const { i, row, column } of group.cells) {
      const at = rows.get(row) * width + place.get(column);
      this.at.set(at, i);
      pixels.data.set(this.owner.colorOf(i), 4 * at);
      pixels.data[4 * at + 3] = 255;
    }
    const small = page.make("canvas", { width, height });
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, left, 0, width * cell, height * tall);
    if (Math.min(cell, tall) >= 6) {
      for (let x = 1; x <= width; x++) context.clearRect(left + x * cell - 1, 0, 1, height * tall);
      for (let y = 1; y <= height; y++) context.clearRect(left, y * tall - 1, width * cell, 1);
    }
    context.fillStyle = page.color("--muted");
    context.font = `10px ${page.color("--sans")}`;
    context.textAlign = "right";
    const every = Math.ceil(12 / tall);
    group.rows.forEach((row, y) => {
      if (y % every === 0) context.fillText(row < 0 ? "–" : row, left - 5, y * tall + tall / 2 + 3.5);
    });
    const bottom = tall * group.rows.length;
    context.textAlign = "center";
    const skip = Math.max(1, Math.ceil(26 / cell));
    this.columns.forEach((column, x) => {
      if (group.experts) {
        if (x % skip === 0) context.fillText(column, left + (x + 0.5) * cell, bottom + 13);
        return;
      }
      context.save();
      context.translate(left + (x + 0.5) * cell + 3, bottom + 5);
      context.rotate(Math.PI / 2);
      context.textAlign = "left";
      context.fillText(column, 0, 0, this.below - 6);
      context.restore();
    });
    this.base = page.make("canvas", { width: this.canvas.width, height: this.canvas.height });
    this.base.getContext("2d").drawImage(this.canvas, 0, 0);
  }

  to(x, y, pointer = null) {
    const i = this.at.get(y * this.columns.length + x);
    if (this.cursor?.x === x && this.cursor?.y === y && !pointer) return;
    this.cursor = { x, y, i };
    this.restore();
    const { context } = this;
    context.lineWidth = 2;
    context.strokeStyle = page.color("--ink");
    context.strokeRect(this.left + x * this.cell - 1, y * this.tall - 1, this.cell + 1, this.tall + 1);
    if (i !== undefined) this.owner.show(i, pointer?.clientX ?? null, pointer?.clientY ?? null);
    else {
      this.owner.hide();
      this.owner.readout.textContent = `no matrix here: layer ${this.group.rows[y]}, ${this.columns[x]}`;
    }
  }

  restore() {
    const { context, canvas } = this;
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.base, 0, 0);
    context.restore();
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - this.left) / this.cell);
    const y = Math.floor((event.clientY - box.top) / this.tall);
    if (x < 0 || y < 0 || x >= this.columns.length || y >= this.group.rows.length) return this.leave();
    this.to(x, y, event);
  }

  key(event) {
    const [width, height] = [this.columns.length, this.group.rows.length];
    let { x, y } = this.cursor ?? { x: 0, y: 0 };
    if (event.key === "Enter" && this.cursor?.i !== undefined) return this.owner.find(this.cursor.i);
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Home") x = 0;
    else if (event.key === "End") x = width - 1;
    else if (!step) return;
    else if (this.cursor) [x, y] = [x + step[0], y + step[1]];
    event.preventDefault();
    this.to(Math.max(0, Math.min(width - 1, x)), Math.max(0, Math.min(height - 1, y)));
  }

  leave() {
    this.cursor = null;
    this.restore();
    this.owner.hide();
  }
}

// ---- start ----
(async () => {
  const tables = JSON.parse(document.getElementById("tensor-data").textContent);
  const grids = new Map();
  for (const [pair, data] of tables.entries()) {
    if (!data || typeof DecompressionStream === "undefined") continue;
    const tensors = await Tensors.read(data);
    const table = document.querySelector(`.tensors[data-pair="${pair}"]`);
    const maps = document.querySelector(`.explorer[data-pair="${pair}"]`);
    for (const element of [table, maps]) element.hidden = false;
    for (const element of [table.nextElementSibling, maps.nextElementSibling])
      if (element?.classList.contains("plain")) element.hidden = true;
    const grid = new Grid(table, tensors, pair);
    grids.set(pair, grid);
    new HeatMaps(maps, tensors, (i) => grid.find(i));
  }
  const follow = () => {
    const found = location.hash.match(/^#tensor-(\d+):(.*)$/);
    const grid = found && grids.get(Number(found[1]));
    const i = grid ? grid.tensors.names().indexOf(decodeURIComponent(found[2])) : -1;
    if (i >= 0) grid.find(i);
  };
  addEventListener("hashchange", follow);
  follow();
  document.documentElement.dataset.ready = "true";
})();
