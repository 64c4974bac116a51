// What lists know of each run: its values by column, conditions on them, and their order.
"use strict";

const FIELDS = {  // the columns that every run has: title, value, how it is shown
  state: ["state", run => stateTextOf(run)[0]],
  iteration: ["iteration", run => run.row.iteration],
  started: ["started", run => run.row.started || undefined, clock],
  duration: ["duration", run => run.row.started ? run.row.updated - run.row.started : undefined, seconds],
  workers: ["workers", run => run.row.world_size],
  failures: ["failures", run => run.row.num_failures],
  tags: ["tags", run => (run.row.tags || []).join(", ") || undefined],
  notes: ["notes", run => run.row.notes || undefined],
};
const KINDS_OF_COLUMN = { config: "config", last: "last", min: "lowest", max: "highest" };
const TEXTS_OF_NUMBERS = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

function splitColumn(column) {  // "last:val/loss" is ["last", "val/loss"]; the name of a field has no kind
  const at = column.indexOf(":");
  return at > 0 && Object.hasOwn(KINDS_OF_COLUMN, column.slice(0, at)) ? [column.slice(0, at), column.slice(at + 1)] : ["", column];
}
function titleOf(column) {
  const [kind, name] = splitColumn(column);
  return kind === "" ? FIELDS[name][0] : kind === "config" ? name : `${name}, ${KINDS_OF_COLUMN[kind]}`;
}
function valueOf(run, column) {  // undefined: the run has no such value
  const [kind, name] = splitColumn(column), { config = {}, metrics = {}, ranges = {} } = run.row;
  if (kind === "") return FIELDS[name][1](run);
  if (kind === "config") return Object.hasOwn(config, name) ? config[name] : undefined;
  if (kind === "last") return Object.hasOwn(metrics, name) ? metrics[name] : undefined;
  return Object.hasOwn(ranges, name) ? ranges[name][kind === "min" ? 0 : 1] : undefined;
}
function shownValue(value, column) {
  if (value === undefined) return "–";
  const [kind, name] = splitColumn(column), format = kind === "" ? FIELDS[name][2] : kind === "config" ? null : formatOf(name);
  return typeof value === "number" ? (format || number)(value) : value === null ? "None" : String(value);
}
const asNumber = value => typeof value === "number" ? value : Object.hasOwn(TEXTS_OF_NUMBERS, value) ? TEXTS_OF_NUMBERS[value] : undefined;
const isFiniteNumber = value => typeof value === "number" && Number.isFinite(value);

function stateTextOf(run) {
  const [text, kind] = stateOf(run.state || run.row.state);
  return run.row.why === "the search ended this trial" ? ["ended by the search", "soft"] : [text, kind];
}
function pathOf(run) {  // below the folder of all runs
  const root = byId("folder").textContent.replace(/\/+$/, ""), path = run.row.run_dir || run.name;
  return path.startsWith(`${root}/`) ? path.slice(root.length + 1) : path.split("/").slice(-2).join("/");
}
const parentOf = path => path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : "";
const listedRuns = () => [...page.runs.values()].filter(run => run.row);

function columnsOf(runs) {  // all columns that these runs can have
  const names = { config: new Set(), last: new Set(), range: new Set() };
  for (const { row } of runs) {
    for (const name of Object.keys(row.config || {})) names.config.add(name);
    for (const name of Object.keys(row.metrics || {})) { names.last.add(name); names.range.add(name); }
    for (const name of Object.keys(row.ranges || {})) if (!AUTOMATIC.has(name)) names.range.add(name);
  }
  const metrics = kind => byRank([...names[kind === "last" ? "last" : "range"]]).map(name => `${kind}:${name}`);
  return [...Object.keys(FIELDS), ...[...names.config].map(name => `config:${name}`), ...metrics("last"), ...metrics("min"), ...metrics("max")];
}
const byRank = names => names.map((name, place) => [rank(name), place, name]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(entry => entry[2]);

// Numbers in their order, then texts; what is missing or not a number is last in both directions.
function compareBy(column, isDescending) {
  const sign = isDescending ? -1 : 1, level = value => value === undefined || Number.isNaN(value) ? 2 : typeof value === "number" ? 0 : 1;
  return (a, b) => {
    let x = valueOf(a, column), y = valueOf(b, column);
    x = asNumber(x) ?? x; y = asNumber(y) ?? y;
    if (level(x) !== level(y)) return level(x) === 2 || level(y) === 2 ? level(x) - level(y) : sign * (level(x) - level(y));
    if (level(x) === 2) return 0;
    return sign * (level(x) === 0 ? Math.sign(x - y) || 0 : String(x).localeCompare(String(y), undefined, { numeric: true }));
  };
}

// Words that a run's name, state, tags, notes or values contain, and conditions such as lr>0.01, state=done, -tag:old.
function parseQuery(text) {
  const parts = text.match(/(?:"[^"]*"|[^\s"]+)+/g) || [];
  return parts.map(part => {
    const isNot = part.startsWith("-") && part.length > 1, plain = (isNot ? part.slice(1) : part).replaceAll('"', "");
    const found = /^([^<>=!~]+)(<=|>=|!=|==|=|<|>|~)(.*)$/.exec(plain);
    const test = found ? conditionOf(found[1].trim(), found[2], found[3].trim()) : wordOf(plain.toLowerCase());
    return isNot ? run => !test(run) : test;
  });
}
const matchesAll = (run, tests) => tests.every(test => test(run));
function wordOf(word) {
  if (word.startsWith("tag:")) return run => (run.row.tags || []).some(tag => tag.toLowerCase() === word.slice(4));
  return run => {
    const { config = {}, tags = [], notes = "", why = "" } = run.row;
    const texts = [run.name, pathOf(run), stateTextOf(run)[0], notes, why, ...tags, ...Object.entries(config).map(([name, value]) => `${name}=${value}`)];
    return texts.some(text => text.toLowerCase().includes(word));
  };
}
function valuesNamed(run, name) {  // of a column, or of the config values and last metrics that are called so, also in a group
  if (Object.hasOwn(FIELDS, name) || splitColumn(name)[0]) return [valueOf(run, name)];
  if (name === "tag") return run.row.tags && run.row.tags.length ? run.row.tags : [undefined];
  if (name === "name") return [run.name];
  const all = { ...run.row.metrics, ...run.row.config };
  if (Object.hasOwn(all, name)) return [all[name]];
  const inGroups = Object.keys(all).filter(key => key.endsWith(`.${name}`) || key.endsWith(`/${name}`));
  return inGroups.length ? inGroups.map(key => all[key]) : [undefined];
}
function conditionOf(name, operator, text) {
  const wanted = text === "" ? NaN : Number(text), lower = text.toLowerCase();
  const holds = value => {
    if (value === undefined) return false;
    const found = asNumber(value), isNumeric = found !== undefined && !Number.isNaN(wanted);
    const same = isNumeric ? found === wanted : (value === null ? "none" : String(value).toLowerCase()) === lower;
    switch (operator) {
      case "=": case "==": return same;
      case "~": return String(value).toLowerCase().includes(lower);
      case "<": return isNumeric && found < wanted;
      case ">": return isNumeric && found > wanted;
      case "<=": return isNumeric && found <= wanted;
      case ">=": return isNumeric && found >= wanted;
      default: return same;
    }
  };
  if (operator === "!=") return run => !valuesNamed(run, name).some(holds);
  return run => valuesNamed(run, name).some(holds);
}

// ------------------------------------------------------------------------------------------------------------ groups

addState("group", "");  // the column whose values are the groups
const isGrouped = runs => Boolean(state.group) && runs.length > 1 && runs.every(run => run.row);
function groupRuns(runs, column) {  // [[value, runs]], in the order of the values
  const groups = new Map();
  for (const run of [...runs].sort(compareBy(column, false))) {
    const key = shownValue(valueOf(run, column), column);
    groups.set(key, [...(groups.get(key) || []), run]);
  }
  return [...groups];
}
// The mean of each group's curves and their range, by iteration; on other axes a point is at the mean of the runs' places.
function curvesOfGroups(runs, name) {
  return groupRuns(runs, state.group).flatMap(([value, members], i) => {
    const points = new Map();
    for (const run of members) {
      const xs = run.x(state.x), ys = run.column(name);
      run.iterations.get().forEach((iteration, k) => {
        if (typeof ys[k] !== "number" || typeof xs[k] !== "number") return;
        const point = points.get(iteration) || { count: 0, x: 0, sum: 0, low: Infinity, high: -Infinity };
        point.count += 1; point.x += xs[k]; point.sum += ys[k];
        point.low = Math.min(point.low, ys[k]); point.high = Math.max(point.high, ys[k]);
        points.set(iteration, point);
      });
    }
    const all = [...points].sort((a, b) => a[0] - b[0]).map(entry => entry[1]), x = all.map(point => point.x / point.count), style = styleOf(i);
    const label = `${titleOf(state.group)} ${value} (${members.length} run${members.length > 1 ? "s" : ""})`, bound = { label, ...style, colour: `${style.colour}2e`, x };
    return [{ label, ...style, x, y: all.map(point => point.sum / point.count) },
            { ...bound, isBound: "high", y: all.map(point => point.high) }, { ...bound, isBound: "low", y: all.map(point => point.low) }];
  });
}
function differingConfigs(runs) {  // the config values that differ, and that most runs have
  const all = columnsOf(runs).filter(column => column.startsWith("config:"));
  const differing = all.filter(column => new Set(runs.map(run => valueOf(run, column)).filter(value => value !== undefined)).size > 1);
  const common = differing.filter(column => 2 * runs.filter(run => valueOf(run, column) !== undefined).length >= runs.length);
  return common.length ? common : differing;
}
