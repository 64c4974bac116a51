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
  const { runs, folder } = await get("api/runs");
  byId("folder").textContent = folder;
  const before = page.runs;
  page.runs = new Map(runs.filter(found => before.has(found.id)).map(found => [found.id, before.get(found.id)]));
  for (const found of runs) {
    const run = page.runs.get(found.id) || addRun(found.id, found.name);
    if (!run.facts) Object.assign(run, { state: found.state, updated: found.updated, started: found.started, iteration: found.iteration });
    else if (!run.isSelected) run.state = found.state;
  }
  page.runs = new Map(runs.map(found => [found.id, page.runs.get(found.id)]));
  if (!before.size) applySelection();
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
  else if (hasListed) show("runs");
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
  applySelection();
  show();
} else {
  show();
  follow();
}
