// The runs of a page. Data comes from the document itself (mode "file") or from the server (mode "live").
"use strict";

const MODE = document.documentElement.dataset.mode;
const TOKEN = document.documentElement.dataset.token || "";
const AUTOMATIC = new Set(["training_iteration", "timestamp", "time_this_iter_s", "time_total_s", "world_size", "attempt",
                           "data_wait_fraction"]);

function decode(encoded) {
  const text = encoded.ref ? byId(encoded.ref).textContent : encoded.data;
  let raw;
  if (Uint8Array.fromBase64) raw = Uint8Array.fromBase64(text);
  else { const chars = atob(text); raw = new Uint8Array(chars.length);
         for (let i = 0; i < raw.length; i++) raw[i] = chars.charCodeAt(i); }
  const isShort = encoded.type === "f4", kind = isShort ? Float32Array : Float64Array;
  const found = new kind(raw.buffer, raw.byteOffset, raw.length / (isShort ? 4 : 8));
  const values = new Array(found.length);
  for (let i = 0; i < found.length; i++) {  // NaN: not reported, a line goes on; infinite: reported and not finite, a gap
    const value = found[i];
    values[i] = value !== value ? undefined : value === Infinity || value === -Infinity ? null : value;
  }
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
      while (values.length < place) values.push(undefined);
      for (const value of found) values.push(value);
    }
    this.chunks = [];
    return this.values;
  }
}

// The first eight colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart. The others are
// as far from each other as they can be with a contrast of 3:1 and more. A run after the last colour has another dash.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#007a5a", "#a8487f", "#8a6d00", "#2f4b7c", "#5b5b5b", "#00838f", "#9c6bff", "#0f3805", "#620a26", "#77009a",
          "#f64e91", "#539e08", "#a20a01", "#9886ad", "#3302a2", "#5446d5", "#348ff9", "#471b61", "#9e3bc3", "#979066", "#851e5a", "#6a3a06"],
  dark: ["#56b4e9", "#ff9955", "#2ed3a2", "#e39ac4", "#f0e442", "#9db7ff", "#c4c4c4", "#4dd0e1", "#767700", "#8e4fdf", "#d8254f", "#347a9f",
         "#a9797c", "#33ab00", "#d850c1", "#b4b52d", "#2778fa", "#50a187", "#b180fc", "#e46212", "#85e243", "#f86685", "#f67ffe", "#b18827"] };
const DASHES = [undefined, [7, 4], [2, 3], [9, 3, 2, 3]];
const colours = () => COLOURS[isDark() ? "dark" : "light"];
const styleOf = place => ({ colour: colours()[place % colours().length], dash: Math.floor(place / colours().length) % DASHES.length });
// The style of one of several curves of a run: further towards black, or white, and another dash.
function shaded({ colour }, place, count) {
  const share = count > 1 ? 0.65 * place / (count - 1) : 0, end = isDark() ? 255 : 0;
  const parts = [1, 3, 5].map(i => Math.round(Number.parseInt(colour.slice(i, i + 2), 16) * (1 - share) + end * share));
  return { colour: `#${parts.map(part => part.toString(16).padStart(2, "0")).join("")}`, dash: place % DASHES.length };
}

class Run {
  constructor(id, name, key) {
    Object.assign(this, { id, name, key, state: "", updated: 0, cursor: -1, isSelected: false, facts: null, row: null, texts: new Map(),
                          nonfinite: new Map(), ranks: [], metrics: [], place: 0, rankCurves: new Map(),
                          rankElements: new Map(), version: 0, factsVersion: 0, isClosed: false, isBehind: false, step: 1, time: null });
    this.iterations = new Column();
    this.columns = new Map();
  }
  get isOver() { return ["done", "stopped", "cancelled", "error"].includes(this.state); }
  get style() { return styleOf(this.place); }
  take(answer) {  // returns whether anything has changed
    const before = this.state;
    this.state = answer.state; this.cursor = answer.cursor; this.updated = answer.updated; this.isClosed = answer.is_closed;
    this.isBehind = answer.is_behind;
    if (answer.time) this.time = answer.time;
    if (answer.facts) { this.facts = answer.facts; this.factsVersion += 1; this.name = (this.row && this.row.title) || answer.facts.name; }
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
      for (const found of this.texts.values()) while (found.length && found[found.length - 1][0] >= results.from) found.pop();
      for (const [name, added] of Object.entries(results.texts)) this.texts.set(name, [...(this.texts.get(name) || []), ...added]);
      Object.assign(this, { nonfinite: new Map(Object.entries(results.nonfinite)), ranks: results.ranks, step: results.step });
      this.version += 1;
    }
    return Boolean(answer.facts || results || before !== this.state);
  }
  hasRanks(name) { return this.ranks.length > 1 && (!AUTOMATIC.has(name) || name === "data_wait_fraction"); }
  column(name) { return this.columns.has(name) ? this.columns.get(name).get() : null; }
  x(kind) {
    if (kind === "iteration") return this.iterations.get();
    if (kind === "training") return this.column("time_total_s") || [];
    if (kind.startsWith("metric:")) return this.column(kind.slice("metric:".length)) || [];
    const started = this.facts ? this.facts.started : 0;
    return (this.column("timestamp") || []).map(time => time - started);
  }
}

const page = { runs: new Map(), charts: new Map(), version: -1, numUnread: 0 };
const selected = () => [...page.runs.values()].filter(run => run.isSelected && run.facts);

addState("run", []);  // the keys of the selected runs, in the order of their colours; empty: the newest one, in a file all

function addRun(id, name) {  // names of folders may be the same below different folders
  const keys = new Set([...page.runs.values()].map(run => run.key));
  let key = name;
  for (let count = 2; keys.has(key); count++) key = `${name} (${count})`;
  const run = new Run(id, name, key);
  page.runs.set(id, run);
  return run;
}
function applySelection() {
  const runs = [...page.runs.values()], isNamed = runs.some(run => state.run.includes(run.key));
  runs.forEach((run, place) => {
    run.isSelected = isNamed ? state.run.includes(run.key) : MODE === "file" || place === 0;
    run.place = isNamed ? state.run.indexOf(run.key) : place;
  });
}
