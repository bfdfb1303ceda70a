"use strict";
// Drawing: elements, numbers, matrices on a canvas, line charts and bars. What is drawn is panels.js's business.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; texts are never read as markup. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** With so many digits after the point; a dash for what is not known. */
const fixed = (value, digits = 3) => (known(value) ? value.toFixed(digits) : "–");
const count = (value) => (known(value) ? whole.format(value) : "–");

function seconds(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e-6) return "0 s"; // rounding
  if (size >= 7200) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 120) return `${(value / 60).toFixed(1)} min`;
  if (size >= 1) return `${value.toFixed(size >= 10 ? 0 : 2)} s`;
  return size >= 0.001 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit ? size.toFixed(1) : size} ${units[unit]}`;
}

// -- colours ---------------------------------------------------------------------------------------------------------

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

/** Cells in colour, walked through by mouse, finger or arrow keys. `show` gives it what to draw:
 *  {rows, columns, colour(row, column), label, rowName, columnName, marked(row, column), tallest}. */
class Matrix {
  constructor(host, { onCursor, onPick } = {}) {
    this.canvas = element("canvas", { tabindex: "0", role: "img" });
    host.replaceChildren(this.canvas);
    this.onCursor = onCursor ?? (() => {});
    this.onPick = onPick ?? (() => {});
    this.cursor = null;
    this.data = null;
    this.pixels = document.createElement("canvas");
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => { this.point(event); this.pick(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(host);
  }

  show(data) {
    this.data = data;
    const { rows, columns } = data;
    this.pixels.width = Math.max(1, columns);
    this.pixels.height = Math.max(1, rows);
    const image = this.pixels.getContext("2d").createImageData(this.pixels.width, this.pixels.height);
    for (let row = 0, at = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1, at += 4) {
        const [red, green, blue] = data.colour(row, column);
        image.data.set([red, green, blue, 255], at);
      }
    }
    this.pixels.getContext("2d").putImageData(image, 0, 0);
    this.canvas.setAttribute("aria-label", data.label);
    if (this.cursor && (this.cursor[0] >= rows || this.cursor[1] >= columns)) this.cursor = null;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { rows, columns, tallest = 420, rowName, columnName, marked } = this.data;
    const width = Math.max(80, this.canvas.parentElement.clientWidth), left = 40, bottom = 18;
    const cell = Math.min(26, Math.max(3, (tallest - bottom) / rows));
    const height = Math.round(cell * rows) + bottom, scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.imageSmoothingEnabled = false;
    this.box = { left, top: 0, width: width - left, height: height - bottom };
    const { box } = this, across = box.width / columns, down = box.height / rows;
    context.drawImage(this.pixels, left, 0, box.width, box.height);
    if (across > 7 && down > 7) {
      context.strokeStyle = css("card");
      context.beginPath();
      for (let column = 1; column < columns; column += 1) lines(context, left + column * across, 0, 0, box.height);
      for (let row = 1; row < rows; row += 1) lines(context, left, row * down, box.width, 0);
      context.stroke();
    }
    if (marked) this.mark(context, marked, across, down);
    context.fillStyle = css("quiet");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    for (const row of ticks(rows, box.height / 14)) context.fillText(row, left - 5, (row + 0.5) * down + 4);
    context.textAlign = "center";
    for (const column of ticks(columns, box.width / 44)) {
      context.fillText(column, left + (column + 0.5) * across, box.height + 14);
    }
    context.save();
    context.translate(9, box.height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(rowName, 0, 0);
    context.restore();
    context.textAlign = "left";
    context.fillText(columnName, 0, box.height + 14);
    if (this.cursor) {
      context.strokeStyle = css("text");
      context.lineWidth = 2;
      context.strokeRect(left + this.cursor[1] * across, this.cursor[0] * down, across, down);
    }
  }

  mark(context, marked, across, down) {
    context.fillStyle = css("mark");
    for (let row = 0; row < this.data.rows; row += 1) {
      for (let column = 0; column < this.data.columns; column += 1) {
        if (!marked(row, column)) continue;
        const x = this.box.left + column * across, y = row * down, size = Math.min(across, down);
        context.beginPath();
        context.moveTo(x + across, y);
        context.lineTo(x + across - size * 0.6, y);
        context.lineTo(x + across, y + size * 0.6);
        context.fill();
      }
    }
  }

  point(event) {
    if (!this.box) return;
    const area = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - area.left - this.box.left) / this.box.width) * this.data.columns);
    const row = Math.floor(((event.clientY - area.top) / this.box.height) * this.data.rows);
    if (column >= 0 && row >= 0 && column < this.data.columns && row < this.data.rows) this.move(row, column);
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.pick();
    } else if (steps[event.key] && this.data) {
      event.preventDefault();
      const [row, column] = this.cursor ?? [0, 0], [down, across] = this.cursor ? steps[event.key] : [0, 0];
      this.move(
        Math.min(this.data.rows - 1, Math.max(0, row + down)),
        Math.min(this.data.columns - 1, Math.max(0, column + across)),
      );
    }
  }

  move(row, column) {
    if (this.cursor && this.cursor[0] === row && this.cursor[1] === column) return;
    this.put([row, column]);
    this.onCursor(row, column);
  }

  /** The cursor there, without telling. */
  put(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  pick() {
    if (this.cursor) this.onPick(...this.cursor);
  }
}

function lines(context, x, y, across, down) {
  context.moveTo(x, y);
  context.lineTo(x + across, y + down);
}

/** Round numbers below `length`, about `most` of them. */
function ticks(length, most) {
  const least = length / Math.max(1, most), power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  const step = [1, 2, 5, 10].map((part) => part * power).find((each) => each >= least) ?? 10 * power;
  return Array.from({ length: Math.ceil(length / step) }, (_, number) => number * step);
}

// -- charts ----------------------------------------------------------------------------------------------------------

/** A label of an axis of times: all in the unit of the greatest. */
function secondsUpTo(value, most) {
  const [size, unit] = most >= 7200 ? [3600, "h"] : most >= 120 ? [60, "min"] : most >= 1 ? [1, "s"]
    : most >= 0.001 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(value / size).toFixed(most / size >= 20 ? 0 : 2)} ${unit}`;
}

/** Lines over steps. series: [{name, colour, values, dashed}], marks: steps of rebalances, floor: lowest of the axis,
 *  label: of a value, given the greatest; unit: of a step. */
function lineChart(host, steps, series, { marks = [], floor = 1, label = (value) => fixed(value, 2), unit = "step" } = {}) {
  const width = Math.max(280, host.clientWidth), height = 230, bottom = 24, top = 8;
  const values = series.flatMap((line) => line.values).filter(known);
  if (!steps.length || !values.length) {
    host.replaceChildren(element("p", { class: "told" }, "Nothing has been measured yet."));
    return;
  }
  const first = steps[0], last = Math.max(steps.at(-1), first + 1);
  const low = Math.min(floor, ...values), high = Math.max(low + (floor ? 0.05 : 1e-6), ...values) * 1.02;
  const levels = [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * (high - low));
  const labels = levels.map((value) => label(value, high));
  const left = 16 + 7 * Math.max(5, ...labels.map((text) => text.length));
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - 10);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const said = series.map((line) => `${line.name} ${fixed(line.values.findLast(known))}`).join(", ");
  svg.setAttribute("aria-label", `Lines from ${unit} ${first} to ${steps.at(-1)}; last: ${said}.`);
  levels.forEach((value, at) => {
    svg.append(shape("line", { x1: left, x2: width - 10, y1: y(value), y2: y(value), stroke: css("line") }));
    svg.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, labels[at]));
  });
  for (const step of marks) {
    if (step < first || step > last) continue;
    const ends = { x1: x(step), x2: x(step), y1: top, y2: height - bottom };
    svg.append(shape("line", { ...ends, stroke: css("mark"), "stroke-dasharray": "2 3" }));
  }
  for (const share of width < 500 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const step = Math.round(first + share * (last - first)), anchor = share === 1 ? "end" : "middle";
    svg.append(shape("text", { x: x(step), y: height - 6, "text-anchor": anchor }, `${share ? "" : `${unit} `}${count(step)}`));
  }
  for (const line of series) {
    let path = "";
    line.values.forEach((value, at) => {
      if (known(value)) path += `${path ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    const look = { "stroke-width": line.width ?? 2, "stroke-dasharray": line.dashed ? "5 4" : "none" };
    svg.append(shape("path", { d: path, fill: "none", stroke: line.colour, ...look }));
  }
  const keys = element("div", { class: "keys" });
  for (const line of series) {
    const key = element("i");
    key.style.borderTopColor = line.colour;
    key.style.borderTopStyle = line.dashed ? "dashed" : "solid";
    keys.append(element("span", {}, key, line.name));
  }
  host.replaceChildren(svg, keys);
}

/** One bar an item: [{name, value, text}]. */
function bars(host, items) {
  const most = Math.max(1e-12, ...items.map((item) => item.value));
  host.replaceChildren(
    ...items.flatMap((item) => {
      const bar = element("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * item.value) / most}%`;
      return [element("span", { title: item.title }, item.name), bar, element("span", { "data-exact": item.value }, item.text)];
    }),
  );
}

/** Tokens of each rank, now in front of the start, and the mean. */
function barsOfRanks(host, now, start) {
  const canvas = host.querySelector("canvas") ?? element("canvas", { role: "img" });
  if (!canvas.isConnected) host.replaceChildren(canvas);
  const width = Math.max(80, host.clientWidth), height = 120, left = 40, scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const most = Math.max(1, ...now, ...start), across = (width - left) / now.length, gap = across > 6 ? 1.5 : 0;
  const tall = (value) => (value / most) * (height - 14);
  for (let rank = 0; rank < now.length; rank += 1) {
    const x = left + rank * across + gap / 2, inside = Math.max(0.5, across - gap);
    context.fillStyle = css("accent");
    context.fillRect(x, height - tall(now[rank]), inside, tall(now[rank]));
    context.strokeStyle = css("start");
    context.beginPath();
    lines(context, x, height - tall(start[rank]), inside, 0);
    if (across > 6) {
      lines(context, x, height, 0, -tall(start[rank]));
      lines(context, x + inside, height, 0, -tall(start[rank]));
    }
    context.stroke();
  }
  const mean = now.reduce((sum, value) => sum + value, 0) / now.length;
  context.strokeStyle = css("text");
  context.setLineDash([4, 3]);
  context.beginPath();
  lines(context, left, height - tall(mean), width - left, 0);
  context.stroke();
  context.fillStyle = css("quiet");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillText("mean", left - 4, height - tall(mean) + 4);
  const said = `mean ${count(mean)}, most ${count(Math.max(...now))} now and ${count(Math.max(...start))} at the start`;
  canvas.setAttribute("aria-label", `Tokens of ${now.length} ranks: ${said}.`);
}

/** columns: [{name, class, cell(row), exact(row)}] */
function table(caption, columns, rows) {
  const heading = (column) => element("th", { scope: "col", class: column.class, title: column.title }, column.name);
  const cell = (column, row) => {
    const shown = column.cell(row), empty = shown === "–" ? "" : null;
    const about = { class: column.class, "data-exact": column.exact?.(row), "data-name": column.name, "data-empty": empty };
    return element("td", about, shown);
  };
  const head = element("tr", {}, ...columns.map(heading));
  const body = rows.map((row) => element("tr", {}, ...columns.map((column) => cell(column, row))));
  return element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body));
}
