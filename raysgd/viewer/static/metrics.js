// The curves of metrics, of pace and of load.
"use strict";

const FIRST_METRICS = 6, MAX_METRICS = 200, RANKS_EVERY_MS = 5000;
const AXES = /(^|[\/_])(epoch|step|sample|token|example|batch)(e?s)?($|_)/i;  // metrics that are often the horizontal axis
const collator = new Intl.Collator();
addState("filter", "");
addState("all", false);
addState("ranks", []);

const { firstMetrics, lastMetrics } = document.documentElement.dataset;
const FIRST = JSON.parse(firstMetrics).map(pattern => new RegExp(pattern, "i")), LAST = new RegExp(lastMetrics);
function rank(name) {  // what most people look at comes first, as in `raysgd ls`
  const found = FIRST.findIndex(pattern => pattern.test(name));
  return LAST.test(name) ? FIRST.length + 1 : found < 0 ? FIRST.length : found;
}
function metricNames() {
  const names = new Set();
  for (const run of selected()) for (const name of run.metrics) if (!AUTOMATIC.has(name)) names.add(name);
  const all = [...names];
  return all.map((name, place) => [rank(name), place, name]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(entry => entry[2]);
}
function curvesOf(name) {
  const runs = selected(), found = [];
  if (isGrouped(runs)) return curvesOfGroups(runs.filter(run => run.columns.has(name)), name);
  for (const run of runs) {
    if (!run.columns.has(name)) continue;
    const xs = run.x(state.x), known = state.ranks.includes(name) && run.hasRanks(name) ? run.rankCurves.get(name) : null;
    if (!known) { found.push({ label: runs.length > 1 ? run.key : name, ...run.style, x: xs, y: run.column(name) }); continue; }
    known.curves.forEach(({ rank, places, y }, i) => found.push({ label: runs.length > 1 ? `${run.key}, rank ${rank}` : `rank ${rank}`,
      ...(runs.length > 1 ? shaded(run.style, i, known.curves.length) : styleOf(i)), x: places ? places.map(place => xs[place]) : xs.slice(0, y.length), y }));
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
    const curves = Object.entries(answer.curves).map(([rank, curve]) => ({ rank, ...pointsOfRank(run, answer.step, curve) }));
    run.rankCurves.set(name, { version: run.version, time: Date.now(), curves });
  }
}
// The values of a rank and the rows that they belong to (null: all). There is a gap where the group had no such rank.
function pointsOfRank(run, step, curve) {
  const y = decode(curve.y);
  if (!curve.x) return { places: step > 1 ? y.map((_, i) => i * step) : null, y };
  const placeOf = new Map(run.iterations.get().map((iteration, i) => [iteration, i])), places = [], values = [];
  decode(curve.x).forEach((iteration, i, all) => {
    if (i && iteration - all[i - 1] > step) { places.push(placeOf.get(all[i - 1]) + 1); values.push(null); }
    places.push(placeOf.get(iteration)); values.push(y[i]);
  });
  return { places, y: values };
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
  const button = h("button", { type: "button", text: "per rank", "aria-pressed": state.ranks.includes(name), onclick: async () => {
    setState({ ranks: state.ranks.includes(name) ? state.ranks.filter(other => other !== name) : [...state.ranks, name] });
    button.setAttribute("aria-pressed", state.ranks.includes(name));
    if (state.ranks.includes(name)) await loadRanks(name);
    chart.refresh();
  } });
  const chart = new Chart({ name, title, unit, format: formatOf(name), isMetric: title === name, button,
    marks: xKind => marksOf(name, xKind), note: () => nonfiniteNote(name) }, () => curvesOf(name));
  chart.button = button;
  return chart;
}

function refreshRanks() {
  for (const chart of page.charts.values()) {
    if (!chart.button) continue;
    chart.button.hidden = !selected().some(run => run.hasRanks(chart.options.name));
    if (state.ranks.includes(chart.options.name)) loadRanks(chart.options.name).then(() => chart.refresh());
  }
}

function showMetrics() {
  showControls();
  const names = metricNames(), words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = names.filter(name => words.every(word => name.toLowerCase().includes(word)));
  const shown = matching.slice(0, state.all || words.length ? MAX_METRICS : FIRST_METRICS);
  keepCharts(byId("charts"), shown, name => metricChart(name));
  refreshRanks();
  const more = Math.min(matching.length, MAX_METRICS) - shown.length, button = byId("more");
  button.hidden = words.length > 0 || names.length <= FIRST_METRICS;
  button.textContent = state.all ? "Show fewer" : `Show ${more} more`;
  const without = selected().filter(run => !run.iterations.get().length);
  const withoutX = selected().filter(run => run.iterations.get().length && !run.x(state.x).length).map(run => `${run.key} has no metric ${xLabelOf(state.x)}.`);
  const notes = without.map(run => run.isOver ? `${run.name} ended before its first result.` : `${run.name} has no result yet.`);
  notes.push(...withoutX);
  if (shown.length === MAX_METRICS && matching.length > MAX_METRICS) notes.push(`Filter to see others than the first ${MAX_METRICS}.`);
  for (const run of selected().filter(found => found.step > 1)) {
    notes.push(`${run.name} has many results: of each ${run.step} iterations, the lowest and the highest value are shown.`);
  }
  if ([...page.runs.values()].some(run => run.isSelected && (!run.facts || run.isBehind))) notes.push("Reading the run's files.");
  else if (!selected().length) notes.push("Select a run.");
  else if (!names.length && !without.length) notes.push("The results have no numbers.");
  else if (!matching.length && names.length) notes.push(`No metric of ${names.length} matches the filter.`);
  byId("ungroup").hidden = !isGrouped(selected());
  byId("ungroup").textContent = state.group ? `Ungroup by ${titleOf(state.group)}` : "";
  byId("metrics-note").textContent = notes.join(" ");
  byId("metrics-count").textContent = names.length ? `${shown.length} of ${names.length} metrics` : "";
}


function showPace() {
  const runs = selected(), has = name => runs.some(run => run.columns.has(name));
  const names = ["data_wait_fraction", "time_this_iter_s", "world_size"].filter(has);
  const titles = { data_wait_fraction: "Time spent waiting for data", time_this_iter_s: "Time for each result", world_size: "Workers" };
  const loads = { rss_bytes: "Memory of workers", cpu_percent: "CPU of workers", gpu_memory_bytes: "GPU memory of workers", gpu_percent: "GPU use of workers" };
  const samples = Object.keys(loads).filter(load => runs.some(run => Object.values(run.facts.samples).some(found => found[load])));
  keepCharts(byId("pace"), [...names, ...samples], name => name in loads
    ? new Chart({ name, title: loads[name], unit: unitOf(name), format: formatOf(name), xKind: "time" }, () => loadCurves(name))
    : metricChart(name, titles[name]));
  refreshRanks();
  return names.length + samples.length > 0;
}
function loadCurves(load) {
  const runs = selected();
  return runs.flatMap(run => Object.entries(run.facts.samples).filter(([, columns]) => columns[load]).map(([rank, columns], i, all) => ({
    label: runs.length > 1 ? `${run.key}, rank ${rank}` : `rank ${rank}`, ...(runs.length > 1 ? shaded(run.style, i, all.length) : styleOf(i)),
    x: decode(columns.time).map(time => time - run.facts.started), y: decode(columns[load]) })));
}

function showControls() {
  const names = metricNames().sort((a, b) => (AXES.test(b) - AXES.test(a)) || collator.compare(a, b)).map(name => `metric:${name}`);
  if (state.x.startsWith("metric:") && !names.includes(state.x)) names.push(state.x);
  const option = kind => h("option", { value: kind, text: xLabelOf(kind) });
  fill(byId("x"), names, () => [...["iteration", "time", "training"].map(option), h("optgroup", { label: "metrics" }, ...names.map(option))]);
  if (document.activeElement !== byId("filter")) byId("filter").value = state.filter;
  byId("x").value = state.x;
  byId("log").checked = state.log;
  byId("clip").checked = state.clip;
  byId("smooth").value = state.smooth;
  byId("smooth-value").value = state.smooth ? String(state.smooth) : "off";
  byId("reset").disabled = !zoomRange();
}
