// The page of `raysgd report` and `raysgd ui`. Data comes from the document itself (mode "file") or from the server
// (mode "live"). Whatever a run contains reaches the document as text, never as markup.
(() => {
"use strict";

const MODE = document.documentElement.dataset.mode;
const TOKEN = document.documentElement.dataset.token || "";
const POLL_MS = 1000, RANKS_EVERY_MS = 5000, LIST_EVERY = 3, FIRST_METRICS = 6, PLOT_HEIGHT = 210, MAX_LANES = 64;
// Colours of Okabe and Ito, which people with any kind of colour vision can tell apart; a second round is dashed.
const COLOURS = { light: ["#0072b2", "#d55e00", "#007a5a", "#a8487f", "#8a6d00", "#2f4b7c", "#5b5b5b", "#00838f"],
                  dark: ["#56b4e9", "#ff9955", "#2ed3a2", "#e39ac4", "#f0e442", "#9db7ff", "#c4c4c4", "#4dd0e1"] };
const AUTOMATIC = new Set(["training_iteration", "timestamp", "time_this_iter_s", "time_total_s", "world_size", "attempt",
                           "data_wait_fraction"]);
const KINDS = { failure: "bad", hang: "bad", mismatch: "bad", controller_restart: "bad", straggler: "warn", preemption: "warn",
                resize: "accent", paused: "soft", resumed: "soft", stop: "soft", cancel: "bad", regroup: "soft" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}
function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---------------------------------------------------------------------------------------------------------- formats

function number(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e7) ? value.toExponential(3) : String(Number(value.toPrecision(digits)));
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600), rest = String(whole % 60).padStart(2, "0");
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest} h` : `${minutes}:${rest} min`;
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value, 3)} ${units[unit]}`;
}
const percent = value => value === null || value === undefined ? "–" : `${number(value * 100, 3)} %`;
const clock = time => time ? new Date(time * 1000).toLocaleString() : "–";
const STATES = { done: ["done", "good"], stopped: ["stopped by a callback", "good"], cancelled: ["cancelled", "warn"],
                 error: ["failed", "bad"], live: ["live", "good"], paused: ["paused", "warn"],
                 silent: ["no end, silent", "warn"], unreadable: ["cannot be read", "bad"] };
const stateOf = name => Object.hasOwn(STATES, name) ? STATES[name] : [String(name), "soft"];
function formatOf(name) {
  if (/(^|[_/])bytes$/.test(name)) return bytes;
  if (/_fraction$/.test(name)) return percent;
  if (/_s$/.test(name)) return seconds;
  return value => number(value);
}
function unitOf(name) {
  if (/(^|[_/])bytes$/.test(name)) return "bytes";
  if (/_percent$/.test(name)) return "%";
  if (/_fraction$/.test(name)) return "fraction";
  if (/_per_s$/.test(name)) return "1/s";
  if (/_ms$/.test(name)) return "ms";
  if (/_s$/.test(name)) return "s";
  return "";
}

// ------------------------------------------------------------------------------------------------------------- data

function decode(encoded) {
  const text = encoded.ref ? byId(encoded.ref).textContent : encoded.data;
  let raw;
  if (Uint8Array.fromBase64) raw = Uint8Array.fromBase64(text);
  else { const chars = atob(text); raw = new Uint8Array(chars.length);
         for (let i = 0; i < raw.length; i++) raw[i] = chars.charCodeAt(i); }
  const isShort = encoded.type === "f4", kind = isShort ? Float32Array : Float64Array;
  const found = new kind(raw.buffer, raw.byteOffset, raw.length / (isShort ? 4 : 8));
  const values = new Array(found.length);
  for (let i = 0; i < found.length; i++) values[i] = found[i] !== found[i] ? null : found[i];  // NaN: missing
  return values;
}

class Column {  // decoded when it is first drawn
  constructor() { this.values = []; this.chunks = []; }
  add(place, encoded) { this.chunks.push([place, encoded]); }
  get() {
    for (const [place, encoded] of this.chunks) {
      const values = this.values, found = decode(encoded);
      if (!values.length && !place) { this.values = found; continue; }
      values.length = Math.min(values.length, place);
      while (values.length < place) values.push(null);
      for (const value of found) values.push(value);
    }
    this.chunks = [];
    return this.values;
  }
}

class Run {
  constructor(id, name) {
    Object.assign(this, { id, name, state: "", updated: 0, cursor: -1, isSelected: false, facts: null, texts: {},
                          nonfinite: new Map(), ranks: [], metrics: [], place: 0, rankCurves: new Map(),
                          rankElements: new Map(), version: 0, isClosed: false });
    this.iterations = new Column();
    this.columns = new Map();
  }
  get isOver() { return ["done", "stopped", "cancelled", "error"].includes(this.state); }
  get style() {
    const colours = COLOURS[dark.matches ? "dark" : "light"];
    return { colour: colours[this.place % colours.length], dash: this.place >= colours.length ? [6, 4] : undefined };
  }
  take(answer) {  // returns whether anything has changed
    const before = this.state;
    this.state = answer.state; this.cursor = answer.cursor; this.updated = answer.updated; this.isClosed = answer.is_closed;
    if (answer.facts) { this.facts = answer.facts; this.name = answer.facts.name; }
    const results = answer.results;
    if (results) {
      const rows = this.iterations.get();
      let place = rows.length;
      while (place > 0 && rows[place - 1] >= results.from) place -= 1;
      this.iterations.add(place, results.iterations);
      for (const [name, encoded] of Object.entries(results.columns)) {
        if (!this.columns.has(name)) { this.columns.set(name, new Column()); this.metrics.push(name); }
        this.columns.get(name).add(place, encoded);
        if (encoded.ranks) this.rankElements.set(name, encoded.ranks);
      }
      Object.assign(this, { texts: results.texts, nonfinite: new Map(Object.entries(results.nonfinite)), ranks: results.ranks });
      this.version += 1;
    }
    return Boolean(answer.facts || results || before !== this.state);
  }
  hasRanks(name) { return this.ranks.length > 1 && (!AUTOMATIC.has(name) || name === "data_wait_fraction"); }
  column(name) { return this.columns.has(name) ? this.columns.get(name).get() : null; }
  x(kind) {
    if (kind === "iteration") return this.iterations.get();
    if (kind === "training") return this.column("time_total_s") || [];
    const started = this.facts ? this.facts.started : 0;
    return (this.column("timestamp") || []).map(time => time - started);
  }
}

const page = { runs: new Map(), x: "iteration", isLog: false, filter: "", showsAll: false, zoom: null, charts: new Map(),
               perRank: new Set(), onlyDifferent: false };
const selected = () => [...page.runs.values()].filter(run => run.isSelected && run.facts);

// ------------------------------------------------------------------------------------------------------------ curves

function ascending(x, y) {  // uPlot needs x in order; repeated iterations are older than those before them
  let isSorted = true;
  for (let i = 1; i < x.length && isSorted; i++) isSorted = x[i] >= x[i - 1];
  if (isSorted) return [x, y];
  const xs = [], ys = [];
  for (let i = 0, last = -Infinity; i < x.length; i++) if (x[i] >= last) { xs.push(last = x[i]); ys.push(y[i]); }
  return [xs, ys];
}
function aligned(curves) {
  const longest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
  const isPrefix = x => { for (let i = 0; i < x.length; i++) if (x[i] !== longest[i]) return false; return true; };
  if (curves.every(curve => curve.x === longest || isPrefix(curve.x))) {
    return [longest, ...curves.map(curve => curve.y.length === longest.length ? curve.y
      : curve.y.concat(new Array(longest.length - curve.y.length).fill(null)))];
  }
  return uPlot.join(curves.map(curve => [curve.x, curve.y]));
}

function lastOf(values) {  // what the legend shows while nothing is pointed at
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

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
  for (const entry of entries) {
    const plot = entry.target.chart.plot, width = Math.floor(entry.contentRect.width);
    if (plot && width > 0 && width !== plot.width) plot.setSize({ width, height: PLOT_HEIGHT });
  }
});

class Chart {
  // curves(): [{label, colour, dash, x, y}]; options: {name, title, unit, format, xKind, marks, perRank}
  constructor(options, curves) {
    Object.assign(this, { options, curves, plot: null, isVisible: false, isStale: true, isQueued: false, key: "" });
    this.holder = h("div", { class: "plot" });
    this.note = h("div", { class: "small warn" });
    const title = options.unit ? `${options.title} [${options.unit}]` : options.title;
    this.element = h("div", { class: "chart", tabindex: 0, role: "group",
        "aria-label": `Curve of ${title}. Plus and minus zoom, left and right move, 0 shows all.`, onkeydown: event => this.press(event) },
      h("div", { class: "head" }, h("h3", { text: title }), options.button || null), this.holder, this.note);
    this.element.chart = this.holder.chart = this;
    observer.observe(this.element);
    resized.observe(this.holder);
  }
  refresh() {
    this.isStale = true;
    if (!this.isVisible || this.isQueued) return;
    this.isQueued = true;
    later(() => { this.isQueued = false; if (this.element.isConnected) this.draw(); });
  }
  draw() {
    this.isStale = false;
    const curves = this.curves().map(curve => { const [x, y] = ascending(curve.x, curve.y); return { ...curve, x, y }; })
                       .filter(curve => curve.x.length);
    if (page.isLog && this.options.canLog) for (const curve of curves) curve.y = curve.y.map(v => (v > 0 ? v : null));
    this.note.textContent = this.options.note ? this.options.note() : "";
    const xKind = this.options.xKind || page.x;
    const key = JSON.stringify([xKind, page.isLog && this.options.canLog, dark.matches, curves.map(c => [c.label, c.colour, c.dash])]);
    if (!curves.length) {
      this.destroy();
      this.holder.replaceChildren(h("p", { class: "soft", text: "No values." }));
      return;
    }
    const data = aligned(curves);
    this.last = data[0][data[0].length - 1]; this.first = data[0][0];
    if (this.plot && key === this.key) {
      this.plot.setData(data, !this.zoomed());
      if (this.zoomed()) this.applyZoom();
    } else {
      this.destroy();
      this.holder.replaceChildren();
      this.key = key;
      this.plot = new uPlot(this.settings(curves, xKind), data, this.holder);
      this.applyZoom();
    }
  }
  zoomed() { return this.options.xKind ? this.ownZoom : page.zoom; }
  settings(curves, xKind) {
    const text = css("--soft"), grid = { stroke: css("--grid"), width: 1 };
    const format = this.options.format, isLog = page.isLog && this.options.canLog;
    const xLabel = { iteration: "training iteration", time: "seconds since the start", training: "seconds of training" }[xKind];
    const xFormat = xKind === "iteration" ? (_, v) => number(v) : (_, v) => v === null ? "–" : seconds(v);
    return {
      width: Math.max(120, Math.floor(this.holder.clientWidth)), height: PLOT_HEIGHT,
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      cursor: { sync: { key: `raysgd-${xKind}` }, drag: { x: true, y: false, setScale: false },
                bind: { dblclick: () => () => { this.setZoom(null); } } },
      legend: { live: true },
      series: [{ label: xLabel, value: (plot, v, _, place) => xFormat(plot, place === null ? this.last : v) }, ...curves.map((curve, i) => ({
        label: curve.label, stroke: curve.colour, width: 1.5, dash: curve.dash, spanGaps: true,
        points: { show: curve.y.length < 60, size: 5 }, value: (plot, v, _, place) => format(place === null ? lastOf(plot.data[i + 1]) : v) }))],
      axes: [{ stroke: text, grid, ticks: grid, label: xLabel, labelSize: 18, size: 32, font: "11px system-ui", labelFont: "11px system-ui" },
             { stroke: text, grid, ticks: grid, size: 62, font: "11px system-ui", values: (_, all) => all.map(v => v === null ? "" : format(v)) }],
      hooks: {
        setSelect: [plot => {
          if (plot.select.width > 4) this.setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
          if (plot.select.width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        draw: [plot => this.drawMarks(plot, xKind)],
      },
    };
  }
  drawMarks(plot, xKind) {  // of values that are not finite, which no curve has
    if (!this.options.marks) return;
    const context = plot.ctx, ratio = devicePixelRatio || 1;
    context.save();
    context.fillStyle = css("--bad");
    context.font = `${10 * ratio}px system-ui`;
    context.textAlign = "left";
    let right = -Infinity;
    for (const [x, text] of this.options.marks(xKind)) {
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
    const { min, max } = this.plot.scales.x, middle = (min + max) / 2, half = (max - min) / 2;
    const steps = { "+": [middle - half / 2, middle + half / 2], "=": [middle - half / 2, middle + half / 2],
                    "-": [middle - 2 * half, middle + 2 * half], ArrowLeft: [min - half / 2, max - half / 2],
                    ArrowRight: [min + half / 2, max + half / 2], 0: null, Escape: null };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const range = steps[event.key];
    this.setZoom(range && (range[0] > this.first || range[1] < this.last) ? range : null);
  }
  destroy() { if (this.plot) this.plot.destroy(); this.plot = null; this.key = ""; }
  remove() { observer.unobserve(this.element); resized.unobserve(this.holder); this.destroy(); this.element.remove(); }
}
function setZoom(range) {
  page.zoom = range;
  byId("reset").disabled = !range;
  for (const chart of page.charts.values()) if (!chart.options.xKind) later(() => chart.applyZoom());
}

function rank(name) {  // what most people look at comes first
  const order = [/loss|error|perplex|ppl/i, /acc|score|f1|reward|auc|bleu|iou/i, /^lr$|learning_rate/i];
  const found = order.findIndex(pattern => pattern.test(name));
  return /(^|\/)(epoch|step)$/.test(name) ? order.length + 1 : found < 0 ? order.length : found;
}
function metricNames() {
  const names = new Set();
  for (const run of selected()) for (const name of run.metrics) if (!AUTOMATIC.has(name)) names.add(name);
  const all = [...names];
  return all.map((name, place) => [rank(name), place, name]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(entry => entry[2]);
}
function curvesOf(name) {
  const runs = selected(), found = [];
  for (const run of runs) {
    const style = run.style;
    if (page.perRank.has(name) && run.hasRanks(name)) {
      const curves = run.rankCurves.get(name);
      if (!curves) continue;
      const colours = COLOURS[dark.matches ? "dark" : "light"];
      Object.entries(curves.values).forEach(([rankNumber, curve], i) => found.push({
        label: runs.length > 1 ? `${run.name}, rank ${rankNumber}` : `rank ${rankNumber}`,
        colour: runs.length > 1 ? style.colour : colours[i % colours.length],
        dash: i % 2 || i >= colours.length ? [3 + i, 4] : undefined, ...curve }));
    } else if (run.columns.has(name)) {
      found.push({ label: runs.length > 1 ? run.name : name, colour: style.colour, dash: style.dash, x: run.x(page.x), y: run.column(name) });
    }
  }
  return found;
}
async function loadRanks(name) {
  for (const run of selected()) {
    const known = run.rankCurves.get(name);
    if (!run.hasRanks(name) || (known && (known.version === run.version || (!run.isOver && Date.now() - known.time < RANKS_EVERY_MS)))) continue;
    let answer;
    try {
      answer = MODE === "file" ? rankCurvesOfFile(run, name) : await get(`api/runs/${run.id}/ranks?metric=${encodeURIComponent(name)}`);
    } catch (error) { showProblem(textOf(error)); }
    if (!answer) continue;
    const iterations = run.iterations.get(), xs = run.x(page.x), values = {};
    const thinned = answer.step > 1 ? xs.filter((_, i) => i % answer.step === 0) : xs;
    const xOf = new Map();
    for (const [rankNumber, curve] of Object.entries(answer.curves)) {
      if (curve.x && !xOf.size) iterations.forEach((iteration, i) => xOf.set(iteration, xs[i]));
      const y = decode(curve.y), x = curve.x ? decode(curve.x).map(iteration => xOf.get(iteration)) : thinned.slice(0, y.length);
      values[rankNumber] = { x, y };
    }
    run.rankCurves.set(name, { version: run.version, time: Date.now(), values });
  }
}
function rankCurvesOfFile(run, name) {
  const element = run.rankElements.get(name);
  return element ? JSON.parse(byId(element).textContent) : null;
}
function marksOf(name, xKind) {
  const found = [];
  for (const run of selected()) {
    const nonfinite = run.nonfinite.get(name);
    if (!nonfinite) continue;
    const iterations = run.iterations.get(), xs = run.x(xKind);
    for (const [iteration, text] of nonfinite.first) found.push([xs[iterations.indexOf(iteration)], text]);
  }
  return found.filter(([x]) => x !== undefined).sort((a, b) => a[0] - b[0]);
}
function nonfiniteNote(name) {
  return selected().filter(run => run.nonfinite.has(name)).map(run => {
    const { count, first } = run.nonfinite.get(name), [iteration, text] = first[0];
    const prefix = selected().length > 1 ? `${run.name}: ` : "";
    return `${prefix}${count} value${count > 1 ? "s are" : " is"} not finite, first ${text} at iteration ${iteration}.`;
  }).join(" ");
}

function keepCharts(parent, names, make) {  // the charts in `parent` become those of `names`, in that order
  const wanted = new Set(names.map(name => `${parent.id} ${name}`));
  for (const [key, chart] of page.charts) {
    if (key.startsWith(`${parent.id} `) && !wanted.has(key)) { chart.remove(); page.charts.delete(key); }
  }
  names.forEach((name, place) => {
    const key = `${parent.id} ${name}`;
    if (!page.charts.has(key)) page.charts.set(key, make(name));
    const chart = page.charts.get(key);
    if (parent.children[place] !== chart.element) parent.insertBefore(chart.element, parent.children[place] || null);
    chart.refresh();
  });
}
function metricChart(name, title = name, unit = unitOf(name)) {
  const button = h("button", { type: "button", text: "per rank", "aria-pressed": page.perRank.has(name), onclick: async () => {
    page.perRank.has(name) ? page.perRank.delete(name) : page.perRank.add(name);
    button.setAttribute("aria-pressed", page.perRank.has(name));
    if (page.perRank.has(name)) await loadRanks(name);
    chart.refresh();
  } });
  const chart = new Chart({ name, title, unit, format: formatOf(name), canLog: title === name, button,
    marks: xKind => marksOf(name, xKind), note: () => nonfiniteNote(name) }, () => curvesOf(name));
  chart.button = button;
  return chart;
}

function refreshRanks() {
  for (const chart of page.charts.values()) {
    if (!chart.button) continue;
    chart.button.hidden = !selected().some(run => run.hasRanks(chart.options.name));
    if (page.perRank.has(chart.options.name)) loadRanks(chart.options.name).then(() => chart.refresh());
  }
}

function showMetrics() {
  const names = metricNames(), words = page.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = names.filter(name => words.every(word => name.toLowerCase().includes(word)));
  const shown = page.showsAll || words.length ? matching : matching.slice(0, FIRST_METRICS);
  keepCharts(byId("charts"), shown, name => metricChart(name));
  refreshRanks();
  const more = matching.length - shown.length, button = byId("more");
  button.hidden = words.length > 0 || names.length <= FIRST_METRICS;
  button.textContent = page.showsAll ? "Show fewer" : `Show ${more} more`;
  const without = selected().filter(run => !run.iterations.get().length);
  const notes = without.map(run => run.isOver ? `${run.name} ended before its first result.` : `${run.name} has no result yet.`);
  if ([...page.runs.values()].some(run => run.isSelected && !run.facts)) notes.push("Reading the run's files.");
  else if (!selected().length) notes.push("Select a run.");
  else if (!names.length && !without.length) notes.push("The results have no numbers.");
  else if (!matching.length && names.length) notes.push(`No metric of ${names.length} matches the filter.`);
  byId("metrics-note").textContent = notes.join(" ");
  byId("metrics-count").textContent = names.length ? `${shown.length} of ${names.length} metrics` : "";
  const texts = selected().flatMap(run => Object.entries(run.texts).map(([name, text]) => [run.name, name, text]));
  fill(byId("texts"), texts, () => texts.length ? h("details", {}, h("summary", { text: "Metrics that are not numbers, last values" }),
    table(["run", "metric", "last value"], texts.map(row => row.map(text => cell(text))))) : []);
}

// -------------------------------------------------------------------------------------------------------- pace, load

function showPace() {
  const runs = selected(), has = name => runs.some(run => run.columns.has(name));
  const names = ["data_wait_fraction", "time_this_iter_s", "world_size"].filter(has);
  const titles = { data_wait_fraction: "Time spent waiting for data", time_this_iter_s: "Time for each result", world_size: "Workers" };
  const loads = { rss_bytes: "Memory of workers", cpu_percent: "CPU of workers", gpu_memory_bytes: "GPU memory of workers", gpu_percent: "GPU use of workers" };
  const samples = Object.keys(loads).filter(load => runs.some(run => Object.values(run.facts.samples).some(found => found[load])));
  byId("pace-section").hidden = !names.length && !samples.length;
  keepCharts(byId("pace"), [...names, ...samples], name => name in loads
    ? new Chart({ name, title: loads[name], unit: unitOf(name), format: formatOf(name), xKind: "time" }, () => loadCurves(name))
    : metricChart(name, titles[name]));
  refreshRanks();
}
function loadCurves(load) {
  const runs = selected(), colours = COLOURS[dark.matches ? "dark" : "light"], found = [];
  for (const run of runs) {
    Object.entries(run.facts.samples).forEach(([rankNumber, columns], i) => {
      if (!columns[load]) return;
      found.push({ label: runs.length > 1 ? `${run.name}, rank ${rankNumber}` : `rank ${rankNumber}`,
        colour: runs.length > 1 ? run.style.colour : colours[i % colours.length], dash: i >= colours.length || (runs.length > 1 && i) ? [3 + i, 4] : undefined,
        x: decode(columns.time).map(time => time - run.facts.started), y: decode(columns[load]) });
    });
  }
  return found;
}

// ------------------------------------------------------------------------------------------------------------ tables

const cell = (text, kind) => h("td", { class: kind || "text", text });
function table(heads, rows, label) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label || heads.join(", ") },
    h("table", {}, h("thead", {}, h("tr", {}, ...heads.map(head => h("th", { scope: "col", text: head })))),
      h("tbody", {}, ...rows.map(row => row instanceof Node ? row : h("tr", {}, ...row)))));
}
function comparison(part, label) {
  const runs = selected(), keys = new Set();
  for (const run of runs) for (const key of Object.keys(run.facts[part])) keys.add(key);
  const rows = [];
  for (const key of keys) {
    const values = runs.map(run => (Object.hasOwn(run.facts[part], key) ? run.facts[part][key] : undefined));
    const differs = runs.length > 1 && new Set(values).size > 1;
    if (page.onlyDifferent && runs.length > 1 && !differs) continue;
    rows.push(h("tr", differs ? { class: "differs" } : {}, h("td", { class: "text", text: key }),
      ...values.map(value => cell(value === undefined ? "–" : value))));
  }
  if (!keys.size) return h("p", { class: "soft", text: "None." });
  if (!rows.length) return h("p", { class: "soft", text: "No differences." });
  return table(["name", ...runs.map(run => runs.length > 1 ? run.name : "value")], rows, label);
}

// Fill an element if what it shows has changed. Open details, scroll positions and the focus stay.
function fill(parent, shown, make) {
  const key = JSON.stringify(shown);
  if (parent.shown === key) return;
  parent.shown = key;
  const keyOf = element => element.dataset.key || element.id || element.getAttribute("aria-label") || element.textContent;
  const open = new Set([...parent.querySelectorAll("details[open]")].map(keyOf));
  const closed = new Set([...parent.querySelectorAll("details:not([open])")].map(keyOf));
  const places = new Map([...parent.querySelectorAll(".scroll")].map(found => [keyOf(found), [found.scrollTop, found.scrollLeft]]));
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const focusKey = focused && (focused.tagName === "SUMMARY" ? keyOf(focused.parentElement) : keyOf(focused));
  parent.replaceChildren(...[make()].flat());
  for (const found of parent.querySelectorAll("details")) {
    if (open.has(keyOf(found))) found.open = true;
    else if (closed.has(keyOf(found))) found.open = false;
  }
  for (const found of parent.querySelectorAll(".scroll")) {
    if (places.has(keyOf(found))) [found.scrollTop, found.scrollLeft] = places.get(keyOf(found));
  }
  if (!focused) return;
  for (const found of parent.querySelectorAll("summary, button, input, [tabindex]")) {
    if (focusKey === (found.tagName === "SUMMARY" ? keyOf(found.parentElement) : keyOf(found))) { found.focus({ preventScroll: true }); break; }
  }
}

function showTables() {
  const runs = selected();
  for (const id of ["config-section", "events-section", "timeline-section"]) byId(id).hidden = !runs.length;
  if (!runs.length) return;
  byId("only-different-label").hidden = runs.length < 2;
  const names = runs.map(run => run.name);
  for (const [part, label] of [["config", "Config"], ["versions", "Versions"], ["settings", "Settings"]]) {
    fill(byId(part), [names, page.onlyDifferent, runs.map(run => run.facts[part])], () => comparison(part, label));
  }
  fill(byId("hosts"), runs.map(run => [run.name, run.facts.workers]), () => runs.map(run => h("div", {},
    runs.length > 1 ? h("h3", { text: run.name }) : null,
    h("ul", { class: "plain small" }, ...run.facts.workers.map(text => h("li", { text }))))));
  const warnings = runs.filter(run => run.facts.num_warnings);
  byId("warnings-section").hidden = !warnings.length;
  fill(byId("warnings"), warnings.map(run => [run.name, run.facts.warnings, run.facts.num_warnings]), () => warnings.map(run => {
    const { warnings: texts, num_warnings: count } = run.facts;
    return h("div", {}, runs.length > 1 ? h("h3", { text: run.name }) : null,
      h("ul", { class: "plain" }, ...texts.map(text => h("li", { text }))),
      count > texts.length ? h("p", { class: "soft", text: `and ${count - texts.length} more` }) : null);
  }));
  const failed = runs.filter(run => run.facts.error);
  fill(byId("errors"), failed.map(run => [run.name, run.facts.error]), () => failed.map(showError));
  fill(byId("events"), runs.map(run => [run.name, run.facts.timeline.events]), () => runs.map(eventsOf));
}
function showError(run) {
  const error = run.facts.error, isError = run.state === "error";
  const place = error.rank !== null && error.rank !== undefined ? ` on rank ${error.rank}${error.node ? `, ${error.node}` : ""}` : "";
  return h("section", { class: "error", "aria-label": "Error" },
    h("h2", { class: isError ? "bad" : "warn", text: `${run.name} ${isError ? "failed" : "was cancelled"}` }),
    h("p", {}, h("strong", { text: error.title + place })),
    error.message ? h("p", { text: error.message }) : null,
    error.traceback ? h("pre", { tabindex: 0, "aria-label": "Traceback", text: error.traceback }) : null,
    error.followed.length ? h("div", {}, h("p", { text: "Errors that followed on other ranks:" }),
      h("ul", { class: "plain" }, ...error.followed.map(([rankNumber, line]) => h("li", { text: `rank ${rankNumber}: ${line}` })))) : null);
}
function eventsOf(run) {
  const { events, num_events: count } = run.facts.timeline, started = run.facts.started;
  const rows = events.slice(-500).reverse().map(event => h("tr", {}, h("td", { class: "number", text: seconds(event.time - started) }),
    h("td", { class: KINDS[event.kind] === "bad" ? "bad" : "", text: event.kind.replaceAll("_", " ") }),
    h("td", { class: "text" }, event.text, ...Object.entries(event.stacks || {}).map(([rankNumber, stack]) =>
      h("details", { "data-key": `${run.id} stack ${event.time} ${rankNumber}` }, h("summary", { text: `stack of rank ${rankNumber}` }), h("pre", { tabindex: 0, text: stack }))))));
  return h("details", { "data-key": `${run.id} events`, open: selected().length === 1 },
    h("summary", { text: `${run.name}: ${count} event${count === 1 ? "" : "s"}${count > rows.length ? `, the last ${rows.length} shown` : ""}` }),
    table(["after", "event", "details"], rows, `Events of ${run.name}, newest first`));
}

// ---------------------------------------------------------------------------------------------------------- timeline

function showTimeline() {
  const runs = selected(), width = byId("timeline").clientWidth;
  fill(byId("timeline"), runs.map(run => [run.name, run.style, width, run.isOver || run.updated, run.facts.timeline]), () => runs.map(timelineOf));
}
function timelineOf(run) {
  const { workers, attempts, checkpoints, events, num_checkpoints: count } = run.facts.timeline;
  const start = run.facts.started || (workers[0] && workers[0].start) || 0, end = Math.max(run.updated, start + 0.001);
  const ranks = [...new Set(workers.map(life => life.rank))].sort((a, b) => a - b), lanes = ranks.slice(0, MAX_LANES);
  const width = Math.max(280, byId("timeline").clientWidth), left = 78, laneHeight = 18, top = 22;
  const height = top + (lanes.length + 1) * laneHeight + 24;
  const at = time => left + (Math.min(Math.max(time, start), end) - start) / (end - start) * (width - left - 8);
  const picture = svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Timeline of ${run.name}: ${workers.length} worker processes, ${attempts.length} attempts, ${count} checkpoints` });
  const title = text => { const element = svg("title", {}); element.textContent = text; return element; };
  const label = (x, y, text, anchor) => { const element = svg("text", { x, y, "text-anchor": anchor || "start" }); element.textContent = text; return element; };
  lanes.forEach((rankNumber, lane) => {
    const y = top + lane * laneHeight;
    picture.append(label(2, y + 13, `rank ${rankNumber}`), svg("line", { class: "lane", x1: left, x2: width - 8, y1: y + 17, y2: y + 17 }));
  });
  for (const life of workers) {
    const lane = lanes.indexOf(life.rank);
    if (lane < 0) continue;
    const y = top + lane * laneHeight + 3, from = at(life.start), to = Math.max(from + 2, at(life.end ?? end));
    const how = { died: "died", left: "left the group", end: "until the end of the run", "": "still there" }[life.how];
    const entered = life.inside.length ? seconds(life.inside[0][0] - start) : "–";
    const text = `rank ${life.rank}, pid ${life.pid} on ${life.node}: ready after ${seconds(life.start - start)}, `
      + `train_func entered after ${entered}, ${how}${life.end ? ` after ${seconds(life.end - start)}` : ""}`;
    const group = svg("g", {}, title(text), svg("rect", { class: "starting", x: from, y, width: to - from, height: 11 }));
    for (const [entry, exit] of life.inside) {
      const begin = Math.max(from, at(entry)), stop = Math.min(to, at(exit ?? life.end ?? end));
      group.append(svg("rect", { fill: run.style.colour, x: begin, y, width: Math.max(1, stop - begin), height: 11 }));
    }
    picture.append(group);
    if (life.how === "died") picture.append(svg("path", { class: "died", d: `M${to - 4},${y + 1}l8,9m0,-9l-8,9` }));
  }
  const y = top + lanes.length * laneHeight + 3;
  picture.append(label(2, y + 10, "checkpoints"));
  let last = -Infinity;
  for (const saved of checkpoints) {
    const to = at(saved.committed), from = saved.seconds === null ? to : at(saved.committed - saved.seconds);
    if (to - last < 1.5) continue;
    last = to;
    picture.append(svg("rect", { class: "saved", x: Math.min(from, to - 2), y, width: Math.max(2, to - from), height: 11 }));
    picture.lastChild.append(title(savedText(saved, start)));
  }
  let lastLabel = -Infinity, lastMark = -Infinity;
  for (const event of events) {
    if (!Object.hasOwn(KINDS, event.kind)) continue;
    const x = at(event.time);
    if (x - lastMark < 1.5 && KINDS[event.kind] !== "bad") continue;
    lastMark = x;
    const colour = `var(--${KINDS[event.kind]})`, line = svg("line", { class: "event", x1: x, x2: x, y1: top - 8, y2: y + 12 });
    line.style.stroke = colour;
    const group = svg("g", {}, title(`${event.kind.replaceAll("_", " ")} after ${seconds(event.time - start)}: ${event.text}`), line);
    if (x - lastLabel > 62) {
      const text = label(Math.min(x + 2, width - 60), 11, event.kind.replaceAll("_", " "));
      text.style.fill = colour;
      group.append(text);
      lastLabel = x;
    }
    picture.append(group);
  }
  const ticks = Math.max(2, Math.min(8, Math.floor((width - left) / 110)));
  for (let i = 0; i <= ticks; i++) {
    const time = start + (end - start) * i / ticks;
    picture.append(label(at(time), height - 6, seconds(time - start), i === 0 ? "start" : i === ticks ? "end" : "middle"));
  }
  const runs = selected();
  const swatch = (text, style) => { const mark = h("i", {}); Object.assign(mark.style, style); return h("span", {}, mark, text); };
  return h("div", {}, runs.length > 1 ? h("h3", { text: run.name }) : null, picture,
    h("div", { class: "key" }, swatch("starts or waits", { background: "var(--line)" }), swatch("in train_func", { background: run.style.colour }),
      swatch("checkpoint is written", { background: "var(--good)" }), h("span", {}, h("strong", { class: "bad", text: "×" }), " worker died"),
      lanes.length < ranks.length ? h("span", { text: `${ranks.length - lanes.length} more ranks are not drawn` }) : null),
    h("details", { "data-key": `${run.id} attempts` }, h("summary", { text: `${attempts.length} attempt${attempts.length === 1 ? "" : "s"}` }),
      table(["attempt", "workers", "began after", "until train_func", "lasted", "from checkpoint", "ended by"], attempts.slice(-200).map(attempt => [
        cell(String(attempt.number), "number"), cell(String(attempt.world_size), "number"), cell(seconds(attempt.start - start), "number"),
        cell(attempt.entered ? seconds(Math.max(0, attempt.entered - attempt.start)) : "–", "number"),
        cell(seconds((attempt.end ?? end) - attempt.start), "number"), cell(attempt.checkpoint || "–"), cell(attempt.why || "–")]), `Attempts of ${run.name}`)),
    h("details", { "data-key": `${run.id} checkpoints` }, h("summary", { text: checkpointSummary(checkpoints, count) }),
      table(["number", "iteration", "committed after", "took", "size", "kept", "metrics"], checkpoints.slice(-200).reverse().map(saved => [
        cell(String(saved.number), "number"), cell(String(saved.iteration), "number"), cell(seconds(saved.committed - start), "number"),
        cell(seconds(saved.seconds), "number"), cell(bytes(saved.num_bytes), "number"), cell(saved.is_deleted ? "deleted" : "kept", ""), cell(saved.metrics)]), `Checkpoints of ${run.name}`)));
}
const savedText = (saved, start) => `checkpoint ${saved.number} of iteration ${saved.iteration}: committed after `
  + `${seconds(saved.committed - start)}, took ${seconds(saved.seconds)}, ${bytes(saved.num_bytes)}`;
function checkpointSummary(checkpoints, count) {
  const times = checkpoints.map(saved => saved.seconds).filter(value => value !== null).sort((a, b) => a - b);
  const middle = times.length ? `, half of them in ${seconds(times[Math.floor(times.length / 2)])} or less, the longest in ${seconds(times[times.length - 1])}` : "";
  return `${count} checkpoint${count === 1 ? "" : "s"}${middle}`;
}

// ---------------------------------------------------------------------------------------------------------- the runs

function showRuns() {
  const runs = [...page.runs.values()];
  const lastOf = run => { const rows = run.facts ? run.iterations.get() : []; const last = rows.length ? rows[rows.length - 1] : run.iteration; return last ? String(last) : "–"; };
  const startedOf = run => (run.facts ? run.facts.started : run.started);
  fill(byId("runs"), runs.map(run => [run.id, run.name, run.state, run.isSelected, run.style, lastOf(run), startedOf(run), Math.round(run.updated)]), () => {
    if (!runs.length) return h("p", { class: "soft", text: MODE === "live" ? "There are no runs in this folder yet." : "No runs." });
    return table(["", "run", "state", "iteration", "started", "last change"], runs.map(run => {
      const [text, kind] = stateOf(run.state);
      const box = h("input", { type: "checkbox", id: `select-${run.id}`, "aria-label": `Compare ${run.name}`, onchange: () => select(run, box.checked) });
      box.checked = run.isSelected;
      const swatch = h("span", { class: "swatch" });
      Object.assign(swatch.style, { borderTopColor: run.isSelected ? run.style.colour : "transparent", borderTopStyle: run.style.dash ? "dashed" : "solid" });
      return [h("td", {}, box), h("td", { class: "text" }, swatch, h("button", { type: "button", class: "name", id: `only-${run.id}`, text: run.name,
          title: "Show this run alone", onclick: () => selectOnly(run) })),
        h("td", { class: kind, text }), cell(lastOf(run), "number"), cell(clock(startedOf(run)), ""), cell(clock(run.updated), "")];
    }), "Runs");
  });
}
async function select(run, isSelected) {
  if (isSelected) {  // the first colour that no other run has
    const used = new Set([...page.runs.values()].filter(other => other.isSelected).map(other => other.place));
    run.place = 0;
    while (used.has(run.place)) run.place += 1;
  }
  run.isSelected = isSelected;
  setZoom(null);
  show();
  if (isSelected) await poll();
}
async function selectOnly(run) {
  for (const other of page.runs.values()) other.isSelected = other === run;
  run.place = 0;
  setZoom(null);
  show();
  await poll();
}
function show() {
  showRuns(); showMetrics(); showPace(); showTables(); showTimeline();
}

// ------------------------------------------------------------------------------------------------------- live updates

async function get(address) {
  const answer = await fetch(address, { headers: { "X-Raysgd-Token": TOKEN }, cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const textOf = error => (error instanceof TypeError ? "The server does not answer. Is raysgd ui still running?" : error.message);
function showProblem(text) { byId("banner").textContent = text; byId("banner").hidden = !text; }
async function listRuns() {  // returns whether a selected run is gone
  const { runs, folder } = await get("api/runs");
  byId("folder").textContent = folder;
  const before = page.runs;
  page.runs = new Map();
  for (const found of runs) {
    const run = before.get(found.id) || new Run(found.id, found.name);
    if (!run.facts) Object.assign(run, { state: found.state, updated: found.updated, started: found.started, iteration: found.iteration });
    else if (!run.isSelected) run.state = found.state;
    page.runs.set(found.id, run);
  }
  if (!before.size && runs.length) page.runs.get(runs[0].id).isSelected = true;
  return [...before.values()].some(run => run.isSelected && !page.runs.has(run.id));
}
let isPolling = false, polls = 0;
async function poll() {
  if (MODE !== "live" || isPolling) return;
  isPolling = true;
  let problem = "", hasChanged = false;
  const attempt = async work => {
    try { hasChanged = (await work()) || hasChanged; }
    catch (error) { problem = textOf(error); }
  };
  const hasListed = polls++ % LIST_EVERY === 0;
  if (hasListed) await attempt(listRuns);
  for (const run of [...page.runs.values()].filter(found => found.isSelected && !found.isClosed)) {
    await attempt(async () => run.take(await get(`api/runs/${run.id}?after=${run.cursor}`)));
  }
  showProblem(problem);
  if (hasChanged) show();
  else if (hasListed) showRuns();
  isPolling = false;
}
async function follow() {
  if (!document.hidden) await poll();
  setTimeout(follow, POLL_MS);
}

// --------------------------------------------------------------------------------------------------------- the start

byId("filter").addEventListener("input", event => { page.filter = event.target.value; showMetrics(); });
byId("x").addEventListener("change", event => { page.x = event.target.value; setZoom(null);
  for (const run of page.runs.values()) run.rankCurves.clear(); showMetrics(); showPace(); });
byId("log").addEventListener("change", event => { page.isLog = event.target.checked; showMetrics(); });
byId("reset").addEventListener("click", () => setZoom(null));
byId("more").addEventListener("click", () => { page.showsAll = !page.showsAll; showMetrics(); });
byId("only-different").addEventListener("change", event => { page.onlyDifferent = event.target.checked; showTables(); });
dark.addEventListener("change", show);
let widthBefore = innerWidth;
addEventListener("resize", () => { if (innerWidth !== widthBefore) { widthBefore = innerWidth; showTimeline(); } });

if (MODE === "file") {
  document.querySelectorAll("script[data-run]").forEach((element, place) => {
    const run = new Run(place, "");
    run.take(JSON.parse(element.textContent));
    Object.assign(run, { isSelected: true, place });
    page.runs.set(place, run);
  });
  show();
} else {
  show();
  follow();
}
})();
