// The view of a search: its trials as a table, in parallel coordinates and as a scatter, and which trial continued which.
"use strict";

addView({ name: "search", title: "Searches" });
addState("metric", "");
addState("against", "");
const brushes = new Map();  // by axis: the range of what is highlighted, from 0 to 1

const searchGrid = new Grid({ label: "Trials", columns: () => searchColumns(), sort: () => state.sort,
  setSort: sort => { setState({ sort }); show("trials"); } });
addSection("search", { id: "search-choice", show: showChoice, content: [h("div", { id: "search-choice" })] });
addSection("search", { id: "parallel", title: "Parallel coordinates", show: showParallel, content: [
  h("div", { class: "bar" }, h("label", {}, "Metric ", h("select", { id: "metric", onchange: event => { setState({ metric: event.target.value }); brushes.clear(); show(); } })),
    h("button", { type: "button", id: "brush-reset", text: "Show all trials", onclick: () => { brushes.clear(); show(); } }),
    h("span", { class: "soft small", text: "Drag along an axis to highlight a range." })), h("div", { id: "parallel" })] });
addSection("search", { id: "scatter", title: "Config against metric", show: showScatter, content: [
  h("div", { class: "bar" }, h("label", {}, "Config ", h("select", { id: "against", onchange: event => { setState({ against: event.target.value }); show("scatter"); } }))),
  h("div", { id: "scatter" })] });
addSection("search", { id: "lineage", title: "Lineage", show: showLineage, content: [h("div", { id: "lineage" })] });
addSection("search", { id: "trials", title: "Trials", show: showTrials, content: [searchGrid.element] });

// The trials of the search that is shown: of each trial the newest run that has reported. Without a search, all runs that are found.
function searchNames() {
  const counts = new Map();
  for (const run of listedRuns()) {
    const name = parentOf(parentOf(pathOf(run)));
    if (name) counts.set(name, (counts.get(name) || new Set()).add(parentOf(pathOf(run))));
  }
  return [...counts].filter(([, trials]) => trials.size > 1).map(([name]) => name).sort();
}
const runsOfSearch = () => viewArgument ? listedRuns().filter(run => parentOf(parentOf(pathOf(run))) === viewArgument) : found();
function trialsOf() {
  if (!viewArgument) return found();
  const trials = new Map(), order = run => [Object.keys(run.row.metrics || {}).length ? 1 : 0, pathOf(run)];
  for (const run of runsOfSearch()) trials.set(parentOf(pathOf(run)), [...(trials.get(parentOf(pathOf(run))) || []), run]);
  return [...trials.values()].map(runs => runs.reduce((a, b) => {
    const [x, nameOfA] = order(a), [y, nameOfB] = order(b);
    return y > x || (x === y && nameOfA.localeCompare(nameOfB, undefined, { numeric: true }) < 0) ? b : a;
  }));
}
const searchMetric = trials => {
  const all = columnsOf(trials).filter(column => ["last", "min", "max"].includes(splitColumn(column)[0]) && trials.some(run => isFiniteNumber(valueOf(run, column))));
  return [all.includes(state.metric) ? state.metric : all[0], all];
};
const searchAxes = trials => differingConfigs(trials).slice(0, 12);
function searchColumns() {
  const trials = trialsOf(), [metric] = searchMetric(trials);
  return ["state", "iteration", ...searchAxes(trials), ...(metric ? [metric] : [])];
}

function showChoice() {
  const names = searchNames();
  fill(byId("search-choice"), [names, viewArgument, found().length], () => h("nav", { class: "bar", "aria-label": "Searches" },
    ...[["", `all runs that are found (${found().length})`], ...names.map(name => [name, name])].map(([name, text]) => {
      const link = viewLink("search", name, text);
      if (name === viewArgument) link.setAttribute("aria-current", "page");
      return link;
    })));
}

// -------------------------------------------------------------------------------------------------------------- axes

// An axis from 0 to 1 for the values of a column: numbers, by their logarithm where they span more than a factor of 50, or names.
function axisOf(runs, column) {
  const values = runs.map(run => { const value = valueOf(run, column); return asNumber(value) ?? value; });
  const numbers = values.filter(isFiniteNumber), others = values.filter(value => value !== undefined && typeof value !== "number");
  const bounds = numbers.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  if (numbers.length && !others.length) {
    const [low, high] = bounds, isLog = low > 0 && high / low > 50, scale = value => isLog ? Math.log(value) : value;
    const distinct = [...new Set(numbers)].sort((a, b) => a - b), width = scale(high) - scale(low), back = place => isLog ? Math.exp(scale(low) + place * width) : low + place * width;
    const isSparse = distinct.length <= 8 && distinct.every((value, i) => !i || scale(value) - scale(distinct[i - 1]) > 0.06 * width);
    return { column, isLog, at: value => { const found = asNumber(value); return isFiniteNumber(found) ? width > 0 ? (scale(found) - scale(low)) / width : 0.5 : null; },
             ticks: isSparse ? distinct.map(value => [width > 0 ? (scale(value) - scale(low)) / width : 0.5, shownValue(value, column)]) : [0, 0.25, 0.5, 0.75, 1].map(place => [place, shownValue(Number(back(place).toPrecision(3)), column)]) };
  }
  const names = [...new Set(values.filter(value => value !== undefined && !Number.isNaN(value)).map(value => shownValue(value, column)))]
    .sort((a, b) => a.localeCompare(b, undefined, { numeric: true })), places = new Map(names.map((name, i) => [name, names.length > 1 ? i / (names.length - 1) : 0.5]));
  const step = Math.ceil(names.length / 12);
  return { column, isLog: false, at: value => value === undefined ? null : places.get(shownValue(value, column)) ?? null,
           ticks: names.filter((_, i) => i % step === 0).map(name => [places.get(name), name]) };
}
const innerWidthOf = view => views.get(view).element.clientWidth - 32;  // of a section, also of one that is still hidden
const clipText = (text, length) => text.length > length ? `${text.slice(0, length - 1)}…` : text;
// From blue to yellow, which people with any kind of colour vision can tell apart, in a lightness that both themes bear.
function shade(place) {
  const stops = isDark() ? [[90, 130, 240], [80, 180, 170], [250, 215, 60]] : [[40, 60, 160], [0, 130, 120], [190, 130, 0]];
  const at = Math.max(0, Math.min(1, place)) * 2, i = Math.min(1, Math.floor(at));
  return `rgb(${stops[i].map((from, k) => Math.round(from + (stops[i + 1][k] - from) * (at - i))).join(",")})`;
}
const svgText = (text, x, y, anchor = "middle") => { const element = svg("text", { x, y, "text-anchor": anchor }); element.textContent = text; return element; };
const svgTitle = text => { const element = svg("title", {}); element.textContent = text; return element; };
const describeTrial = (run, columns) => `${run.name}: ${columns.map(column => `${titleOf(column)} ${shownValue(valueOf(run, column), column)}`).join(", ")}`;
const isHighlighted = (run, axes) => axes.every(axis => {
  const range = brushes.get(axis.column), place = axis.at(valueOf(run, axis.column));
  return !range || (place !== null && place >= range[0] && place <= range[1]);
});

function showParallel() {
  const trials = trialsOf(), [metric, metrics] = searchMetric(trials), columns = [...searchAxes(trials), ...(metric ? [metric] : [])];
  fill(byId("metric"), metrics, () => metrics.map(column => h("option", { value: column, text: titleOf(column) })));
  if (metric) byId("metric").value = metric;
  byId("brush-reset").disabled = !brushes.size;
  const width = innerWidthOf("search");
  fill(byId("parallel"), [trials.map(run => [run.id, run.row.version]), columns, [...brushes], width, isDark()], () => parallelOf(trials, columns, metric, width));
}
function parallelOf(trials, columns, metric, outerWidth) {
  if (!trials.length) return h("p", { class: "soft", text: "No trials." });
  if (columns.length < 2) return h("p", { class: "soft", text: "The trials differ in no config value, or have no metric that is a number." });
  const axes = columns.map(column => axisOf(trials, column)), gap = Math.max(110, (outerWidth - 120) / (axes.length - 1));
  const width = gap * (axes.length - 1) + 120, height = 330, top = 44, bottom = 300, xOf = i => 60 + i * gap, yOf = place => bottom - place * (bottom - top);
  const picture = svg("svg", { class: "plot-svg", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Parallel coordinates of ${trials.length} trials` });
  const colourAxis = axes[axes.length - 1], missing = trials.filter(run => axes.some(axis => axis.at(valueOf(run, axis.column)) === null));
  const order = [...trials].sort((a, b) => isHighlighted(a, axes) - isHighlighted(b, axes));
  for (const run of order) {
    const places = axes.map(axis => axis.at(valueOf(run, axis.column))), isOn = isHighlighted(run, axes);
    let path = "", isDown = false;
    places.forEach((place, i) => { if (place === null) { isDown = false; return; } path += `${isDown ? "L" : "M"}${xOf(i)},${yOf(place)}`; isDown = true; });
    const line = svg("path", { class: isOn ? "trial" : "trial off", d: path }, svgTitle(describeTrial(run, columns)));
    const colour = places[places.length - 1];
    line.style.stroke = colour === null ? "var(--soft)" : shade(colour);
    line.addEventListener("click", () => openRun(run));
    picture.append(line);
  }
  axes.forEach((axis, i) => {
    const x = xOf(i), group = svg("g", { class: "axis" }, svgTitle(titleOf(axis.column)), svg("line", { x1: x, x2: x, y1: top, y2: bottom }),
      svgText(clipText(titleOf(axis.column), Math.floor(gap / 7)), x, top - 24), svgText(axis.isLog ? "logarithmic" : "", x, top - 10));
    for (const [place, text] of axis.ticks) group.append(svg("line", { x1: x - 4, x2: x, y1: yOf(place), y2: yOf(place) }), svgText(clipText(text, Math.floor(gap / 9)), x + 6, yOf(place) + 4, "start"));
    const range = brushes.get(axis.column);
    if (range) group.append(svg("rect", { class: "brush", x: x - 8, width: 16, y: yOf(range[1]), height: yOf(range[0]) - yOf(range[1]) }));
    const grip = svg("rect", { class: "grip", x: x - 14, width: 28, y: top - 10, height: bottom - top + 20 });  // beyond the ends, which are values, too
    grip.addEventListener("pointerdown", event => brush(event, axis.column, picture, y => Math.max(0, Math.min(1, (bottom - y) / (bottom - top)))));
    group.append(grip);
    picture.append(group);
  });
  return [h("div", { class: "scroll plot-scroll", tabindex: 0, role: "region", "aria-label": "Picture: parallel coordinates" }, picture),
    h("p", { class: "soft small", text: `${trials.length} trials, coloured by ${titleOf(colourAxis.column)}.`
      + (missing.length ? ` ${missing.length} have no value on some axis; their lines have gaps.` : "") })];
}
function brush(event, column, picture, placeOf) {
  const box = picture.getBoundingClientRect(), ratio = picture.viewBox.baseVal.height / box.height, at = each => placeOf((each.clientY - box.top) * ratio), begin = at(event);
  const move = each => { const end = at(each); brushes.set(column, [Math.min(begin, end), Math.max(begin, end)]); show("parallel", "trials"); };
  const stop = each => {
    removeEventListener("pointermove", move); removeEventListener("pointerup", stop);
    if (Math.abs(at(each) - begin) < 0.01) brushes.delete(column);
    show("parallel", "trials");
  };
  addEventListener("pointermove", move); addEventListener("pointerup", stop);
  event.preventDefault();
}

function showScatter() {
  const trials = trialsOf(), [metric] = searchMetric(trials), configs = searchAxes(trials);
  const against = configs.includes(state.against) ? state.against : configs[0];
  fill(byId("against"), configs, () => configs.map(column => h("option", { value: column, text: titleOf(column) })));
  if (against) byId("against").value = against;
  if (!metric || !against) return false;
  const width = innerWidthOf("search");
  fill(byId("scatter"), [trials.map(run => [run.id, run.row.version]), metric, against, width, isDark()], () => scatterOf(trials, against, metric, width));
}
function scatterOf(trials, against, metric, outerWidth) {
  const width = Math.max(260, Math.min(900, outerWidth)), height = 320, left = 70, bottom = 270, top = 20, xAxis = axisOf(trials, against), yAxis = axisOf(trials, metric);
  const xOf = place => left + place * (width - left - 40), yOf = place => bottom - place * (bottom - top);
  const picture = svg("svg", { class: "plot-svg", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `${titleOf(metric)} against ${titleOf(against)}` });
  for (const [place, text] of yAxis.ticks) picture.append(svg("line", { class: "grid-line", x1: left, x2: width - 40, y1: yOf(place), y2: yOf(place) }), svgText(clipText(text, 9), left - 8, yOf(place) + 4, "end"));
  const xTicks = xAxis.ticks.filter((_, i) => width > 500 || xAxis.ticks.length < 4 || i % 2 === 0);
  for (const [place, text] of xTicks) picture.append(svg("line", { class: "grid-line", x1: xOf(place), x2: xOf(place), y1: top, y2: bottom }), svgText(clipText(text, 12), xOf(place), bottom + 18));
  picture.append(svgText(`${titleOf(against)}${xAxis.isLog ? ", logarithmic" : ""}`, (left + width - 40) / 2, height - 8));
  const points = trials.map(run => [run, xAxis.at(valueOf(run, against)), yAxis.at(valueOf(run, metric))]).filter(([, x, y]) => x !== null && y !== null);
  for (const [run, x, y] of points) {
    const point = svg("circle", { class: "trial", cx: xOf(x), cy: yOf(y), r: 5, tabindex: 0, role: "link", "aria-label": describeTrial(run, [against, metric]) }, svgTitle(describeTrial(run, [against, metric])));
    point.style.fill = shade(y);
    point.addEventListener("click", () => openRun(run));
    point.addEventListener("keydown", event => { if (event.key === "Enter") openRun(run); });
    picture.append(point);
  }
  const without = trials.length - points.length;
  return [picture, h("p", { class: "soft small", text: `${titleOf(metric)}${yAxis.isLog ? ", logarithmic," : ""} upwards.${without ? ` ${without} of ${trials.length} trials have no value.` : ""}` })];
}

// ------------------------------------------------------------------------------------------------------------ lineage

// Each trial is a lane, each of its runs a bar over its iterations. A line leads to a run from the trial that it continues.
function showLineage() {
  const runs = viewArgument ? runsOfSearch() : [], copies = runs.filter(run => trialOfSource(run) && trialOfSource(run) !== parentOf(pathOf(run)));
  const width = innerWidthOf("search");
  fill(byId("lineage"), [runs.map(run => [run.id, run.row.version]), width, isDark()], () => copies.length ? lineageOf(runs, copies, width) : []);
  return copies.length > 0;
}
function trialOfSource(run) {  // of the checkpoint that a run began with, which is in the folder of a trial or of one of its runs
  const parts = (run.row.source || "").replace(/\/+$/, "").split("/"), at = parts.findIndex((part, i) => i > 0 && parts.slice(0, i).join("/").endsWith(`/${viewArgument}`));
  return at > 0 && at < parts.length - 1 ? `${viewArgument}/${parts[at]}` : "";
}
function lineageOf(runs, copies, outerWidth) {
  const trials = [...new Set(runs.map(run => parentOf(pathOf(run))))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const most = Math.max(1, ...runs.map(run => run.row.iteration)), left = Math.min(200, outerWidth / 3), width = Math.max(320, outerWidth), lane = 34, top = 8, height = top + trials.length * lane + 26;
  const xOf = iteration => left + iteration / most * (width - left - 20), yOf = trial => top + trials.indexOf(trial) * lane + lane / 2;
  const picture = svg("svg", { class: "plot-svg", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Lineage of ${trials.length} trials, with ${copies.length} copies` });
  const nameOf = trial => trial.slice(trial.lastIndexOf("/") + 1);
  for (const trial of trials) {
    const text = svgText(clipText(nameOf(trial), Math.floor(left / 7)), 2, yOf(trial) + 4, "start");
    text.append(svgTitle(nameOf(trial)));
    picture.append(text, svg("line", { class: "grid-line", x1: left, x2: width - 20, y1: yOf(trial), y2: yOf(trial) }));
  }
  runs.forEach(run => {
    const y = yOf(parentOf(pathOf(run))), from = xOf(run.row.first || 0), to = Math.max(from + 3, xOf(run.row.iteration));
    const bar = svg("rect", { class: "lineage-run", x: from, width: to - from, y: y - 5, height: 10 }, svgTitle(`${pathOf(run)}: iterations ${(run.row.first || 0) + 1} to ${run.row.iteration}, ${stateTextOf(run)[0]}; `
      + Object.entries(run.row.config || {}).map(([name, value]) => `${name}=${value}`).join(", ")));
    bar.addEventListener("click", () => openRun(run));
    picture.append(bar);
    if (stateTextOf(run)[0] === "ended by the search") picture.append(svg("line", { class: "lineage-stop", x1: to, x2: to, y1: y - 9, y2: y + 9 }));
  });
  for (const run of copies) {
    const from = trialOfSource(run), x = xOf(run.row.first || 0);
    if (!trials.includes(from)) continue;
    picture.append(svg("path", { class: "lineage-copy", d: `M${x},${yOf(from)}L${x},${yOf(parentOf(pathOf(run)))}` },
      svgTitle(`${nameOf(parentOf(pathOf(run)))} continues ${nameOf(from)} from iteration ${run.row.first}`)), svg("circle", { class: "lineage-copy", cx: x, cy: yOf(from), r: 3.5 }));
  }
  picture.append(svgText("0", left, height - 8), svgText(`iteration ${most}`, width - 20, height - 8, "end"));
  return [h("div", { class: "scroll plot-scroll", tabindex: 0, role: "region", "aria-label": "Picture: lineage" }, picture), h("p", { class: "soft small",
    text: `${copies.length} run${copies.length > 1 ? "s" : ""} continued the checkpoint of another trial: a dot marks the trial that was copied. An upright line ends a run that the search ended.` })];
}

function showTrials() {
  const trials = trialsOf(), axes = [...brushes.keys()].map(column => axisOf(trials, column));
  searchGrid.show(trials.filter(run => isHighlighted(run, axes)));
  return trials.length > 0;
}
