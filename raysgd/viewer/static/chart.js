// A chart: curves drawn by uPlot, with a legend, zoom by mouse and keyboard, and marks of what cannot be drawn.
"use strict";

const PLOT_HEIGHT = 210, FONT = "11px system-ui";
addState("x", "iteration");  // or "time", "training", or "metric:" and the name of a metric
addState("log", false);
addState("clip", false);
addState("smooth", 0);
addState("zoom", []);

// -------------------------------------------------------------------------------------------------------- the points

// The points that have both numbers, in the order of x, which uPlot needs.
function inOrder(x, y, isMetric) {
  let isOrdered = true;
  for (let i = 0; i < x.length && isOrdered; i++) isOrdered = typeof x[i] === "number" && (i === 0 || x[i] >= x[i - 1]);
  if (isOrdered) return [x, y];
  const places = [];
  for (let i = 0, last = -Infinity; i < x.length; i++) {
    if (typeof x[i] !== "number" || (!isMetric && x[i] < last)) continue;  // an iteration that was repeated is newer than those after it
    places.push(i);
    last = x[i];
  }
  if (isMetric) places.sort((a, b) => x[a] - x[b] || a - b);
  return [places.map(i => x[i]), places.map(i => y[i])];
}

// The curves as uPlot takes them: one x for all, and undefined where a curve has no point. A curve may have an x several times.
function aligned(curves) {
  const longest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
  const isPrefix = x => { for (let i = 0; i < x.length; i++) if (x[i] !== longest[i]) return false; return true; };
  if (curves.every(curve => curve.x === longest || isPrefix(curve.x))) return [longest, ...curves.map(curve => curve.y)];
  const xs = [], ys = curves.map(() => []), places = curves.map(() => 0);
  for (;;) {
    let next = Infinity;
    for (let k = 0; k < curves.length; k++) if (places[k] < curves[k].x.length) next = Math.min(next, curves[k].x[places[k]]);
    if (next === Infinity) return [xs, ...ys];
    xs.push(next);
    for (let k = 0; k < curves.length; k++) ys[k].push(curves[k].x[places[k]] === next ? curves[k].y[places[k]++] : undefined);
  }
}

// The moving average of TensorBoard: exponential, and divided by the sum of its weights, so that it does not begin near 0.
function smoothed(values, weight) {
  let sum = 0, weights = 0;
  return values.map(value => {
    if (typeof value !== "number") return value;
    sum = sum * weight + value * (1 - weight);
    weights = weights * weight + (1 - weight);
    return sum / weights;
  });
}

// The places of points that no line reaches: those between two gaps.
function lonely(values) {
  const found = [];
  let before = null, isAlone = false, place = -1;
  for (let i = 0; i <= values.length; i++) {
    const value = i < values.length ? values[i] : null;
    if (value === undefined) continue;
    if (value === null) { if (isAlone) found.push(place); isAlone = false; }
    else { isAlone = before === null; place = i; }
    before = value;
  }
  return found;
}

const lastOf = values => values.findLast(value => value !== null && value !== undefined) ?? null;
const numberOfValues = values => values.reduce((count, value) => count + (typeof value === "number"), 0);

// ------------------------------------------------------------------------------------------------------------- axes

function xLabelOf(kind) {
  return { iteration: "training iteration", time: "time since the start", training: "time in training" }[kind] || kind.slice("metric:".length);
}
const xFormatOf = kind => kind === "time" || kind === "training" ? seconds : kind === "iteration" ? number : formatOf(xLabelOf(kind));

function paddedRange(min, max, isLog) {
  if (isLog) return uPlot.rangeLog(min, max, 10, false);
  if (min === 0 && max === 0) return [-1, 1];
  if (max - min > 1e-20 || (min === max && Math.abs(min) > 1e-20)) return uPlot.rangeNum(min, max, 0.1, true);
  const room = (max - min) / 10 || Math.abs(max);  // uPlot takes these for 0
  return [min - room, max + room];
}
// The range without the highest and the lowest twentieth of the values in view.
function clippedRange(plot) {
  const values = [], [from, to] = plot.series[0].idxs;
  for (let k = 1; k < plot.series.length; k++) {
    if (plot.series[k].show) for (let i = from; i <= to; i++) if (typeof plot.data[k][i] === "number") values.push(plot.data[k][i]);
  }
  values.sort((a, b) => a - b);
  return values.length ? [values[Math.floor(0.05 * (values.length - 1))], values[Math.ceil(0.95 * (values.length - 1))]] : [null, null];
}

// ------------------------------------------------------------------------------------------------------------ drawing

const waiting = [];  // charts are drawn one in a task, so that the page answers meanwhile
function later(work) {
  if (waiting.push(work) === 1) setTimeout(workOne, 0);
}
function workOne() {
  try { waiting[0](); }
  finally { waiting.shift(); if (waiting.length) setTimeout(workOne, 0); }
}
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    chart.isVisible = entry.isIntersecting;
    if (chart.isVisible && chart.isStale) chart.refresh();
  }
}, { rootMargin: "150px" });
const resized = new ResizeObserver(entries => {
  if (matchMedia("print").matches) return;  // paper gets the picture of the screen, in another size
  for (const entry of entries) {
    const plot = entry.target.chart.plot, width = Math.floor(entry.contentRect.width);
    if (plot && width > 0 && width !== plot.width) later(() => plot.setSize({ width, height: PLOT_HEIGHT }));
  }
});

class Chart {
  // curves(): [{label, colour, dash, x, y}], the mean of a group followed by its isBound "high" and "low"; options: {name, title, unit, format, xKind, isMetric, marks, note, button}
  constructor(options, curves) {
    Object.assign(this, { options, curves, plot: null, isVisible: false, isStale: true, isQueued: false, key: "", hidden: new Set() });
    this.holder = h("div", { class: "plot" });
    this.legend = h("div", { class: "legend" });
    this.note = h("div", { class: "small warn" });
    this.title = options.unit ? `${options.title} [${options.unit}]` : options.title;
    const save = (text, kind, content) => h("button", { type: "button", text, "aria-label": `Save ${this.title} as ${text}`,
      onclick: async () => { const made = await content(); if (made) download(new Blob([made], { type: kind }), `${options.title}.${text.toLowerCase()}`); } });
    this.element = h("div", { class: "chart", tabindex: 0, role: "group",
        "aria-label": `Curve of ${this.title}. Plus and minus zoom, left and right move, with shift they read values, 0 shows all.`, onkeydown: event => this.press(event) },
      h("div", { class: "head" }, h("h3", { text: this.title }), h("div", { class: "buttons" }, options.button || null,
        save("CSV", "text/csv", () => this.toTable()), save("PNG", "image/png", () => this.toPicture()))),
      this.holder, this.legend, this.note);
    this.element.chart = this.holder.chart = this;
    observer.observe(this.element);
    resized.observe(this.holder);
  }
  get isLog() { return state.log && Boolean(this.options.isMetric); }
  get smoothing() { return this.options.isMetric ? Math.min(Math.max(state.smooth, 0), 0.999) : 0; }
  get xKind() { return this.options.xKind || state.x; }
  refresh() {
    this.isStale = true;
    if (!this.isVisible || this.isQueued) return;
    this.isQueued = true;
    later(() => { this.isQueued = false; if (this.element.isConnected) this.draw(); });
  }
  points() {
    return this.curves().map(curve => { const [x, y] = inOrder(curve.x, curve.y, this.xKind.startsWith("metric:")); return { ...curve, x, y }; })
               .filter(curve => curve.x.length);
  }
  draw() {
    this.isStale = false;
    const notes = [this.options.note ? this.options.note() : ""];
    let curves = this.points();
    if (this.smoothing) {
      curves = [...curves.filter(curve => !curve.isBound).map(curve => ({ ...curve, colour: `${curve.colour}55`, isRaw: true })),
                ...curves.map(curve => ({ ...curve, y: smoothed(curve.y, this.smoothing) }))];
    }
    if (this.isLog) {
      let count = 0;
      for (const curve of curves) curve.y = curve.y.map(v => (typeof v === "number" && v <= 0 ? (count += this.smoothing && !curve.isRaw ? 0 : 1, null) : v));
      if (count) notes.push(`${count} value${count > 1 ? "s are" : " is"} not above 0, and not drawn on a logarithmic axis.`);
    }
    this.note.textContent = notes.filter(Boolean).join(" ");
    const key = JSON.stringify([this.xKind, this.isLog, state.clip, isDark(), curves.map(c => [c.label, c.colour, c.dash, c.isRaw, c.isBound])]);
    if (!curves.some(curve => curve.y.some(value => typeof value === "number"))) {
      this.destroy();
      this.holder.replaceChildren(h("p", { class: "soft", text: "No values." }));
      this.legend.replaceChildren();
      return;
    }
    const data = aligned(curves);
    this.last = data[0][data[0].length - 1]; this.first = data[0][0];
    this.lonely = [[], ...data.slice(1).map(lonely)];
    if (this.plot && key === this.key) {
      this.plot.setData(data, !this.zoomed());
      if (this.zoomed()) this.applyZoom();
    } else {
      this.destroy();
      this.holder.replaceChildren();
      this.key = key;
      this.plot = new uPlot(this.settings(curves), data, this.holder);
      this.makeLegend(curves);
      this.applyZoom();
    }
    this.showValues();
  }
  zoomed() { return this.options.xKind ? this.ownZoom : zoomRange(); }
  settings(curves) {
    const text = css("--soft"), grid = { stroke: css("--grid"), width: 1 }, format = this.options.format, xFormat = xFormatOf(this.xKind);
    const axis = { stroke: text, grid, ticks: grid, font: FONT };
    const ticks = (form, count, steps = form === seconds ? TIME_STEPS : null) => ({ incrs: [Number.MAX_VALUE], values: (_, all) => tickTexts(all, form), filter: (_, all) => all,
      splits: (plot, k, min, max) => k && this.isLog ? logTicksOf(min, max, count(plot)) : ticksOf(min, max, count(plot), steps) });
    const range = (plot, min, max) => {
      if (state.clip) [min, max] = clippedRange(plot);
      return min === null ? [null, null] : paddedRange(min, max, this.isLog);
    };
    return {
      width: Math.max(120, Math.floor(this.holder.clientWidth)), height: PLOT_HEIGHT,
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1, range } },
      cursor: { sync: { key: `raysgd-${this.xKind}` }, drag: { x: true, y: false, setScale: false },
                bind: { dblclick: () => () => { this.setZoom(null); } } },
      legend: { show: false },
      bands: curves.flatMap((curve, i) => curve.isBound === "high" ? [{ series: [i + 1, i + 2], fill: curve.colour }] : []),
      series: [{}, ...curves.map((curve, i) => ({
        label: curve.label, stroke: curve.colour, width: curve.isBound ? 0 : curve.isRaw ? 1 : 1.75, dash: DASHES[curve.dash || 0], show: !this.hidden.has(curve.label),
        points: { show: !curve.isRaw && !curve.isBound && numberOfValues(curve.y) < 60, size: 5, filter: (_, k, isShown) => isShown ? null : this.lonely[k] } }))],
      axes: [{ ...axis, ...ticks(xFormat, plot => plot.width / 70, this.xKind === "iteration" ? WHOLE_STEPS : undefined), label: xLabelOf(this.xKind), labelSize: 18, size: 32, labelFont: FONT },
             { ...axis, ...ticks(format, () => 6), size: (_, texts) => texts ? 18 + 6.2 * Math.max(2, ...texts.map(text => text.length)) : 50 }],
      hooks: {
        setSelect: [plot => {
          if (plot.select.width > 4) this.setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
          if (plot.select.width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setLegend: [() => this.showValues()],
        draw: [plot => this.drawMarks(plot)],
      },
    };
  }
  makeLegend(curves) {
    this.entries = curves.map((curve, i) => {
      if (curve.isRaw || curve.isBound) return null;
      const value = h("span", { class: "value" });
      const button = h("button", { type: "button", "aria-pressed": !this.hidden.has(curve.label), title: "Show or hide this curve", onclick: () => {
        this.hidden.has(curve.label) ? this.hidden.delete(curve.label) : this.hidden.add(curve.label);
        button.setAttribute("aria-pressed", !this.hidden.has(curve.label));
        curves.forEach((other, k) => other.label === curve.label && this.plot.setSeries(k + 1, { show: !this.hidden.has(curve.label) }));
      } }, swatch(curve), h("span", { class: "label", text: curve.label }), value);
      return { value, button, curve, place: i + 1, raw: curves.findIndex(other => other.isRaw && other.label === curve.label) + 1 };
    }).filter(Boolean);
    this.xValue = h("span", { class: "value" });
    this.legend.replaceChildren(h("div", { class: "x" }, h("span", { class: "label", text: xLabelOf(this.xKind) }), this.xValue), ...this.entries.map(entry => entry.button));
  }
  showValues() {  // of the points below the pointer, otherwise the last ones
    const { data, cursor } = this.plot, idxs = cursor.idxs || [];
    const at = place => idxs[place] === null || idxs[place] === undefined ? lastOf(data[place]) : data[place][idxs[place]];
    const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };
    set(this.xValue, xFormatOf(this.xKind)(at(0)));
    for (const { value, place, raw } of this.entries) {
      set(value, this.options.format(at(place)) + (raw ? ` (${this.options.format(at(raw))})` : ""));
    }
  }
  drawMarks(plot) {  // of values that are not finite, which no curve has
    if (!this.options.marks) return;
    const context = plot.ctx, ratio = devicePixelRatio || 1;
    context.save();
    context.fillStyle = css("--bad");
    context.font = `${10 * ratio}px system-ui`;
    context.textAlign = "left";
    let right = -Infinity;
    for (const [x, text] of this.options.marks(this.xKind)) {
      const left = plot.valToPos(x, "x", true);
      if (left < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) continue;
      context.fillRect(left - ratio, plot.bbox.top, 2 * ratio, 7 * ratio);
      if (left > right) { context.fillText(text, left + 3 * ratio, plot.bbox.top + 9 * ratio); right = left + 45 * ratio; }
    }
    context.restore();
  }
  setZoom(range) { if (this.options.xKind) { this.ownZoom = range; this.applyZoom(); } else setZoom(range); }
  applyZoom() {
    if (!this.plot) return;
    const range = this.zoomed();
    if (range) this.plot.setScale("x", { min: range[0], max: range[1] });
    else this.plot.setData(this.plot.data, true);
  }
  press(event) {
    if (event.target !== this.element || !this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) {  // the values of one point after the other are in the legend
      event.preventDefault();
      const { cursor, over } = this.plot, from = cursor.left >= 0 ? cursor.left : over.clientWidth;
      this.plot.setCursor({ left: Math.min(Math.max(from + (event.key === "ArrowLeft" ? -6 : 6), 0), over.clientWidth - 1), top: 10 });
      return;
    }
    const { min, max } = this.plot.scales.x, middle = (min + max) / 2, half = (max - min) / 2;
    const steps = { "+": [middle - half / 2, middle + half / 2], "=": [middle - half / 2, middle + half / 2],
                    "-": [middle - 2 * half, middle + 2 * half], ArrowLeft: [min - half / 2, max - half / 2],
                    ArrowRight: [min + half / 2, max + half / 2], 0: null, Escape: null };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    const range = steps[event.key];
    this.setZoom(range && (range[0] > this.first || range[1] < this.last) ? range : null);
  }

  // ------------------------------------------------------------------------------------------------------- what is saved

  toTable() {  // a row for each x, as it was reported: not smoothed, and not what is in view alone
    const curves = this.points();
    if (!curves.length) return "";
    const [xs, ...columns] = aligned(curves), quoted = text => `"${String(text).replaceAll('"', '""')}"`;
    const isShort = value => Math.fround(value) === value && !Number.isInteger(value);  // 4 bytes have 7 digits
    const text = value => value === undefined ? "" : value === null ? "NaN" : isShort(value) ? Number(value.toPrecision(7)) : value;
    const rows = xs.map((x, i) => [x, ...columns.map(column => column[i])].map(text).join(","));
    return `${[xLabelOf(this.xKind), ...curves.map(curve => `${curve.label}${curve.isBound ? `, ${curve.isBound === "high" ? "highest" : "lowest"}` : ""}`)].map(quoted).join(",")}\n${rows.join("\n")}\n`;
  }
  async toPicture() {  // title, curves and legend, in the colours of the page
    this.draw();
    if (!this.plot) return null;
    await Promise.resolve();  // uPlot draws in a microtask
    const source = this.plot.ctx.canvas, ratio = devicePixelRatio || 1, pad = 10, line = 17, width = this.plot.width + 2 * pad;
    const shown = this.entries.filter(({ curve }) => !this.hidden.has(curve.label));
    const picture = h("canvas", { width: width * ratio, height: (PLOT_HEIGHT + 2 * pad + line * (shown.length + 1.5)) * ratio });
    const context = picture.getContext("2d");
    context.fillStyle = css("--card");
    context.fillRect(0, 0, picture.width, picture.height);
    context.drawImage(source, pad * ratio, (pad + line * 1.3) * ratio);
    context.scale(ratio, ratio);
    context.fillStyle = css("--text");
    context.font = "600 14px system-ui";
    context.fillText(this.title, pad, pad + 12, width - 2 * pad);
    context.font = "12px system-ui";
    shown.forEach(({ curve, value }, i) => {
      const y = PLOT_HEIGHT + pad + line * (i + 2.2);
      context.strokeStyle = curve.colour;
      context.lineWidth = 2;
      context.setLineDash(DASHES[curve.dash || 0] || []);
      context.beginPath(); context.moveTo(pad, y - 4); context.lineTo(pad + 24, y - 4); context.stroke();
      context.fillText(`${curve.label}: ${value.textContent}`, pad + 30, y, width - 2 * pad - 30);
    });
    return new Promise(resolve => { picture.toBlob(resolve); });
  }
  destroy() { if (this.plot) this.plot.destroy(); this.plot = null; this.key = ""; }
  remove() { observer.unobserve(this.element); resized.unobserve(this.holder); this.destroy(); this.element.remove(); }
}
function download(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name.replace(/[\\/:*?"<>|\x00-\x1f]+/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
function swatch({ colour, dash }) {
  return svg("svg", { class: "swatch", width: 24, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 24, y1: 5, y2: 5,
    stroke: colour, "stroke-width": 2.5, "stroke-dasharray": (DASHES[dash || 0] || []).join(" ") }));
}

const zoomRange = () => state.zoom.length === 2 && state.zoom.every(end => Number.isFinite(Number(end))) ? state.zoom.map(Number) : null;
function setZoom(range) {
  setState({ zoom: range ? range.map(String) : [] });
  byId("reset").disabled = !range;
  for (const chart of page.charts.values()) if (!chart.options.xKind) later(() => chart.applyZoom());
}

// Paper shows all charts of the view, also those that were never scrolled to, in dark on white.
addEventListener("beforeprint", () => {
  applyTheme("light");
  show();
  for (const chart of page.charts.values()) if (chart.element.checkVisibility()) chart.draw();
});
addEventListener("afterprint", () => { applyTheme(); show(); });
