"use strict";
// Drawing: elements, numbers, matrices on a canvas, line charts and tables. What is drawn is decided in page.js.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; texts are never read as markup. */
const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
const shape = (name, attributes, ...children) => filled(document.createElementNS(SVG, name), attributes, children);

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const known = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits = 3) => (known(value) ? value.toFixed(digits) : "–");
const count = (value) => (known(value) ? whole.format(value) : "–");
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);

/** Size and name of the unit in which a time is read best. */
function unitOf(seconds) {
  if (seconds >= 7200) return [3600, " h"];
  if (seconds >= 120) return [60, " min"];
  if (seconds >= 1) return [1, " s"];
  return seconds >= 0.001 ? [1e-3, " ms"] : [1e-6, " µs"];
}

function seconds(value) {
  if (!known(value)) return "–";
  if (Math.abs(value) < 1e-6) return "0 s"; // rounding
  const [size, unit] = unitOf(Math.abs(value)), shown = value / size;
  return `${shown.toFixed(Math.abs(shown) >= 10 ? 0 : unit === " s" ? 2 : 1)}${unit}`;
}

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, unit = 0;
  for (; size >= 1024 && unit < units.length - 1; unit += 1) size /= 1024;
  return `${unit ? size.toFixed(1) : size} ${units[unit]}`;
}

/** Round numbers from `low` (or below) to `high`, about `most` of them: 1.0, 1.2, 1.4. `least`: the smallest step. */
function ticks(low, high, most, least = 0) {
  const wanted = Math.max((high - low) / Math.max(1, most), least, 1e-9), power = 10 ** Math.floor(Math.log10(wanted));
  const step = power * [1, 2, 5, 10].find((part) => part * power >= wanted * 0.999);
  const first = Math.floor(low / step + 1e-6), last = Math.ceil(high / step - 1e-6);
  const values = Array.from({ length: last - first + 1 }, (_, at) => (first + at) * step);
  return { values, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

let colours = null;

/** Red, green and blue of a colour of page.css. */
function colour(name) {
  colours ??= new Map();
  if (!colours.has(name)) {
    const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim().slice(1);
    colours.set(name, [0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16)));
  }
  return colours.get(name);
}

const css = (name) => `rgb(${colour(name).join(" ")})`;
const between = (from, to, share) => from.map((value, part) => Math.round(value + (to[part] - value) * share));

/** Of a load over its mean: 1 is neutral, `most` is hottest. */
function heat(ratio, most) {
  if (ratio <= 1) return between(colour("cold"), colour("even"), Math.max(0, ratio));
  return between(colour("even"), colour("hot"), Math.min(1, (ratio - 1) / Math.max(1e-9, most - 1)));
}

// -- a matrix on a canvas --------------------------------------------------------------------------------------------

/** Cells in colour, with a cursor for mouse, finger and arrow keys. `show` gives it what to draw:
 *  {rows, columns, colour(row, column), label, rowName, columnName, marked(row, column), tallest}. */
class Matrix {
  constructor(host, { onCursor = () => {}, onPick = () => {} } = {}) {
    this.canvas = element("canvas", { tabindex: "0", role: "img" });
    host.replaceChildren(this.canvas);
    Object.assign(this, { onCursor, onPick, cursor: null, data: null, pixels: document.createElement("canvas") });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => { this.point(event); this.pick(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(host);
  }

  show(data) {
    const { rows, columns } = data, image = new ImageData(Math.max(1, columns), Math.max(1, rows));
    for (let row = 0, at = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1, at += 4) {
        image.data.set([...data.colour(row, column), 255], at);
      }
    }
    Object.assign(this.pixels, { width: image.width, height: image.height });
    this.pixels.getContext("2d").putImageData(image, 0, 0);
    this.canvas.setAttribute("aria-label", data.label);
    this.data = data;
    if (this.cursor && (this.cursor[0] >= rows || this.cursor[1] >= columns)) this.cursor = null;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { rows, columns, tallest = 420, rowName, columnName, marked } = this.data;
    const width = Math.max(80, this.canvas.parentElement.clientWidth), left = 40, bottom = 18;
    const height = Math.round(Math.min(26, Math.max(3, (tallest - bottom) / rows)) * rows) + bottom;
    const scale = window.devicePixelRatio || 1, context = this.canvas.getContext("2d");
    Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    this.canvas.style.height = `${height}px`;
    this.box = { left, width: width - left, height: height - bottom };
    const { box } = this, across = box.width / columns, down = box.height / rows, gap = across > 7 && down > 7 ? 1 : 0;
    context.scale(scale, scale);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.pixels, left, 0, box.width, box.height);
    context.fillStyle = css("card");
    for (let at = 1; gap && at < columns; at += 1) context.fillRect(left + at * across, 0, gap, box.height);
    for (let at = 1; gap && at < rows; at += 1) context.fillRect(left, at * down, box.width, gap);
    context.fillStyle = css("mark");
    for (let cell = 0; marked && cell < rows * columns; cell += 1) {
      const row = Math.floor(cell / columns), column = cell % columns, size = 0.6 * Math.min(across, down);
      if (!marked(row, column)) continue;
      const x = left + (column + 1) * across, y = row * down;
      context.fill(new Path2D(`M${x} ${y}H${x - size}L${x} ${y + size}Z`));
    }
    context.fillStyle = css("quiet");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    for (const row of indices(rows, box.height / 14)) context.fillText(row, left - 5, (row + 0.5) * down + 4);
    context.textAlign = "center";
    for (const column of indices(columns, box.width / 44)) {
      context.fillText(column, left + (column + 0.5) * across, box.height + 14);
    }
    context.textAlign = "left";
    context.fillText(columnName, 0, box.height + 14);
    context.translate(9, box.height / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(rowName, 0, 0);
    if (!this.cursor) return;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    Object.assign(context, { strokeStyle: css("text"), lineWidth: 2 });
    context.strokeRect(left + this.cursor[1] * across, this.cursor[0] * down, across, down);
  }

  point(event) {
    if (!this.box) return;
    const area = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - area.left - this.box.left) / this.box.width) * this.data.columns);
    const row = Math.floor(((event.clientY - area.top) / this.box.height) * this.data.rows);
    if (column >= 0 && row >= 0 && column < this.data.columns && row < this.data.rows) this.move(row, column);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const picks = event.key === "Enter" || event.key === " ";
    if (!this.data || !(step || picks)) return;
    event.preventDefault();
    if (picks) return this.pick();
    const [row, column] = this.cursor ? [this.cursor[0] + step[0], this.cursor[1] + step[1]] : [0, 0];
    const inside = (at, length) => Math.min(length - 1, Math.max(0, at));
    this.move(inside(row, this.data.rows), inside(column, this.data.columns));
  }

  move(row, column) {
    if (this.cursor && this.cursor[0] === row && this.cursor[1] === column) return;
    this.put([row, column]);
    this.onCursor(row, column);
  }

  /** Set the cursor without calling `onCursor`. */
  put(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  pick() {
    if (this.cursor) this.onPick(...this.cursor);
  }
}

const indices = (length, most) => ticks(0, length, most, 1).values.filter((index) => index < length);

/** Lines over steps. series: [{name, colour, values, dashed}], marks: steps of rebalances, floor: lowest of the axis,
 *  timed: values are seconds. */
function lineChart(host, steps, series, { marks = [], floor = 1, timed = false } = {}) {
  const values = series.flatMap((line) => line.values).filter(known);
  if (!steps.length || !values.length) {
    host.replaceChildren(element("p", { class: "told" }, "Nothing has been measured yet."));
    return;
  }
  const width = Math.max(280, host.clientWidth), height = 230, bottom = 38, top = 8, left = 60, right = 14;
  const highest = Math.max(floor, ...values), [size, name] = timed ? unitOf(highest) : [1, ""];
  const levels = ticks(Math.min(floor, ...values) / size, Math.max(highest / size, floor + 0.04), 6);
  const times = ticks(steps[0], Math.max(steps.at(-1), steps[0] + 1), Math.min(7, width / 80), 1).values;
  const [low, high] = [levels.values[0], levels.values.at(-1)], [first, last] = [times[0], times.at(-1)];
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const y = (value) => top + (1 - (value / size - low) / (high - low)) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const said = series.map((line) => `${line.name} ${fixed(line.values.findLast(known))}`).join(", ");
  svg.setAttribute("aria-label", `Lines from step ${steps[0]} to ${steps.at(-1)}; last: ${said}.`);
  for (const level of levels.values) {
    const at = y(level * size);
    svg.append(shape("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: css("line") }));
    svg.append(shape("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, level.toFixed(levels.digits) + name));
  }
  for (const step of marks.filter((step) => step >= first && step <= last)) {
    const ends = { x1: x(step), x2: x(step), y1: top, y2: height - bottom };
    svg.append(shape("line", { ...ends, stroke: css("mark"), "stroke-dasharray": "2 3" }));
  }
  const middle = { "text-anchor": "middle" };
  for (const step of times) svg.append(shape("text", { ...middle, x: x(step), y: height - bottom + 16 }, count(step)));
  svg.append(shape("text", { ...middle, x: (left + width - right) / 2, y: height - 5 }, "step"));
  for (const line of series) {
    const points = line.values.map((value, at) => [steps[at], value]).filter(([, value]) => known(value));
    const path = points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    const look = { "stroke-width": line.width ?? 2, "stroke-dasharray": line.dashed ? "5 4" : "none" };
    svg.append(shape("path", { d: path.join(""), fill: "none", stroke: line.colour, ...look }));
  }
  const keys = series.map((line) => {
    const key = element("i");
    Object.assign(key.style, { borderTopColor: line.colour, borderTopStyle: line.dashed ? "dashed" : "solid" });
    return element("span", {}, key, line.name);
  });
  host.replaceChildren(svg, element("div", { class: "keys" }, ...keys));
}

/** columns: [{name, class, title, cell(row), exact(row)}] */
function table(caption, columns, rows) {
  const heading = (column) => element("th", { scope: "col", class: column.class, title: column.title }, column.name);
  const cell = (column, row) => {
    const shown = column.cell(row), { name, class: kind, exact } = column, empty = shown === "–" ? "" : null;
    return element("td", { class: kind, "data-exact": exact?.(row), "data-name": name, "data-empty": empty }, shown);
  };
  const head = element("tr", {}, ...columns.map(heading));
  const body = rows.map((row) => element("tr", {}, ...columns.map((column) => cell(column, row))));
  const parts = [element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body)];
  return element("table", {}, ...parts);
}
