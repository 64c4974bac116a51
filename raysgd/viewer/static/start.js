// Asks the server for what is new, and shows the page.
"use strict";

const POLL_MS = 1000, LIST_EVERY = 3;

async function get(address) {
  const answer = await fetch(address, { headers: { "X-Raysgd-Token": TOKEN }, cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const textOf = error => (error instanceof TypeError ? "The server does not answer. Is raysgd ui still running?" : error.message);
function showProblem(text) { byId("banner").textContent = text; byId("banner").hidden = !text; }
async function listRuns() {  // returns whether a selected run is gone
  const wantsRanges = [...state.column, state.sort, state.metric].some(column => /^-?(min|max):/.test(column)) || shownView.name === "search";
  const { runs, ids, version, folder, num_unread: numUnread } = await get(`api/runs?after=${page.version}${wantsRanges ? "&ranges=1" : ""}`);
  byId("folder").textContent = folder;
  const before = page.runs, changed = new Map(runs.map(row => [row.id, row]));
  Object.assign(page, { version, numUnread, runs: new Map(ids.filter(id => before.has(id)).map(id => [id, before.get(id)])) });
  for (const id of ids) {
    const row = changed.get(id), run = page.runs.get(id) || addRun(id, row.name);
    if (!row) continue;
    run.row = { ...row, version };
    run.name = row.title || row.name;
    if (!run.facts) Object.assign(run, { state: row.state, updated: row.updated, started: row.started, iteration: row.iteration });
    else if (!run.isSelected) run.state = row.state;
  }
  page.runs = new Map(ids.map(id => [id, page.runs.get(id)]));
  if (!before.size) applySelection();
  return [...before.values()].some(run => run.isSelected && !page.runs.has(run.id));
}
let isPolling = false, polls = 0;
async function poll(lists = false) {
  if (MODE !== "live" || isPolling) return;
  isPolling = true;
  let problem = "", hasChanged = false;
  const attempt = async work => {
    try { hasChanged = (await work()) || hasChanged; }
    catch (error) { problem = textOf(error); }
  };
  const hasListed = lists || polls++ % LIST_EVERY === 0 || page.numUnread > 0;
  if (hasListed) await attempt(listRuns);
  for (const run of [...page.runs.values()].filter(found => found.isSelected && !found.isClosed)) {
    await attempt(async () => {
      let isNew = false;
      do {  // a long run comes in parts
        isNew = run.take(await get(`api/runs/${run.id}?after=${run.cursor}`)) || isNew;
        if (run.isBehind) show();
      } while (run.isBehind && run.isSelected);
      return isNew;
    });
  }
  showProblem(problem);
  if (hasChanged) show();
  else show("output", "time", ...(hasListed ? ["runs", "all-runs", "trials", "parallel", "scatter", "lineage", "search-choice"] : []));
  isPolling = false;
}
async function follow() {
  if (!document.hidden) await poll();
  setTimeout(follow, POLL_MS);
}

makeTools();
readAddress();
addEventListener("hashchange", async () => { readAddress(); applySelection(); show(); await poll(); });
systemIsDark.addEventListener("change", () => { applyTheme(); show(); });
if (MODE === "file") {
  for (const element of document.querySelectorAll("script[data-run]")) {
    const answer = JSON.parse(element.textContent);
    addRun(page.runs.size, answer.facts.name).take(answer);
  }
  for (const row of JSON.parse(byId("rows").textContent)) {
    const run = page.runs.get(row.id);
    Object.assign(run, { row, name: row.title || run.name });
  }
  applySelection();
  show();
} else {
  show();
  follow();
}
