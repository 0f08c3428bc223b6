// The operator's page: reads server-sent events of ui/events and draws them. No libraries, no build step.
import { BlockMap, STATES, drawSample } from "./blocks.js";

const SILENT_MS = 3000;
const TOKEN_KEY = "quire-token";
const element = (id) => document.getElementById(id);
const blocks = new BlockMap(element("cells"), element("tip"), element("sequences"));
const view = { replica: "", frame: null, heardAt: Date.now(), problem: "" };

// Formatting

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) => `${number(100 * share)} %`;
const duration = (s) =>
  s < 120 ? `${number(s)} s` : s < 7200 ? `${number(s / 60)} min` : `${number(s / 3600)} h`;
const latency = (s) => (s === null ? ["–", ""] : s < 1 ? [number(1000 * s), "ms"] : [number(s, 1), "s"]);

/** Make an element with attributes and children; text is never parsed as HTML. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function figure(title, value, unit = "", note = "") {
  return make("div", {}, make("dt", {}, title), make("dd", {}, value, unit ? make("small", {}, unit) : ""),
    note ? make("dd", { class: "note" }, note) : "");
}

function latencyFigure(title, { p50_s, p99_s }) {
  const [value, unit] = latency(p50_s);
  return figure(title, value, unit, p99_s === null ? "" : `p99 ${latency(p99_s).join(" ")}`);
}

// Models

function sparkline(values) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const top = Math.max(1, ...values);
  svg.setAttribute("viewBox", "0 0 59 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Generated tokens per second, last minute");
  const first = 60 - values.length;
  const points = values.map((value, index) => `${first + index},${(40 - (38 * value) / top).toFixed(1)}`);
  for (const [kind, path] of [
    ["area", `M${first},40 L${points.join(" L")} L59,40 Z`],
    ["line", `M${points.join(" L")}`],
  ]) {
    const drawn = document.createElementNS(space, "path");
    drawn.setAttribute("class", kind);
    drawn.setAttribute("d", values.length > 1 ? path : "");
    svg.append(drawn);
  }
  return svg;
}

function modelSheet(traffic, fleet) {
  const replicas = fleet.replicas.filter((replica) => replica.model === traffic.model);
  const deployment = fleet.deployments.find((each) => each.model === traffic.model);
  const ready = replicas.filter((replica) => replica.ready).length;
  const sum = (field) => replicas.reduce((total, replica) => total + replica.queue[field], 0);
  const wanted = deployment ? `${ready} of ${deployment.target_replicas} replicas · ${deployment.reason}`
    : `${ready} of ${replicas.length} ready`;
  return make("article", { class: "sheet" },
    make("div", { class: "title" }, make("h2", {}, traffic.model), make("span", { class: "note" }, wanted)),
    deployment && deployment.problem ? make("p", { class: "problem" }, deployment.problem) : "",
    make("dl", { class: "figures" },
      figure("generated", number(traffic.generated_tokens_per_s), "tokens/s"),
      figure("prompts", number(traffic.prompt_tokens_per_s), "tokens/s"),
      figure("running", number(sum("num_running"))),
      figure("waiting", number(sum("num_waiting") + traffic.num_unplaced)),
      latencyFigure("first token", traffic.first_token),
      latencyFigure("between tokens", traffic.inter_token),
      figure("completions", number(traffic.completions_per_s, 1), "/s",
        traffic.errors_per_s > 0 ? `${number(traffic.errors_per_s, 1)} errors/s` : "")),
    sparkline(traffic.generated_tokens_per_s_history));
}

// Replicas

function stateOf(replica) {
  if (replica.silence_s > SILENT_MS / 1000) return ["bad", `silent for ${duration(replica.silence_s)}`];
  if (replica.ready && replica.state !== "draining") return ["", "ready"];
  const name = replica.state && replica.state !== "ready" ? replica.state : "not ready";
  const isBad = name === "failed" || name === "not ready";
  return [isBad ? "bad" : "warn", replica.problem ? `${name}: ${replica.problem}` : name];
}

function blockBar(kv) {
  const total = Math.max(1, kv.num_blocks);
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  for (const [kind, count] of [
    ["active", kv.num_used_blocks], ["fenced", kv.num_fenced_blocks], ["cached", kv.num_cached_blocks],
  ]) {
    const part = make("i", { class: kind });
    part.style.width = `${(100 * count) / total}%`;
    bar.append(part);
  }
  return bar;
}

function blockKey(kv) {
  const hits = kv.prefix_query_tokens ? kv.prefix_hit_tokens / kv.prefix_query_tokens : 0;
  const empty = kv.num_blocks - kv.num_used_blocks - kv.num_fenced_blocks - kv.num_cached_blocks;
  const host = kv.num_host_blocks ? ` · ${number(kv.num_used_host_blocks)} of ${number(kv.num_host_blocks)} in host memory` : "";
  const states = kv.num_state_slots ? ` · states in ${number(kv.num_used_state_slots)} of ${number(kv.num_state_slots)} slots, ` +
    `${number(kv.num_snapshots)} snapshots` : "";
  return make("p", { class: "key" },
    `${number(kv.num_used_blocks)} blocks active, ${number(kv.num_fenced_blocks)} fenced, ` +
    `${number(kv.num_cached_blocks)} cached, ${number(empty)} empty · ${kv.block_size} tokens each · ` +
    `prefix hits ${percent(hits)}${host}${states}`);
}

function replicaSheet(replica) {
  const [kind, state] = stateOf(replica);
  const { kv, queue } = replica;
  const isShown = replica.replica_id === view.replica;
  const show = make("button", { class: "show", "aria-pressed": String(isShown) }, isShown ? "blocks below" : "show blocks");
  show.addEventListener("click", () => select(replica.replica_id));
  const title = make("div", { class: "title" },
    make("h2", {}, replica.replica_id), make("span", { class: `state ${kind}` }, state),
    make("span", { class: "note" }, `${replica.model} ${replica.version} · up ${duration(replica.uptime_s)}`), show);
  if (!kv.num_blocks) return make("article", { class: "sheet" }, title); // it has not answered yet
  const busy = replica.uptime_s ? replica.busy_s / replica.uptime_s : 0;
  return make("article", { class: "sheet" }, title,
    make("dl", { class: "figures" },
      figure("running", number(queue.num_running)),
      figure("waiting", number(queue.num_waiting), "",
        replica.oldest_wait_s >= 1 ? `oldest for ${duration(replica.oldest_wait_s)}` : ""),
      figure("speed while busy", number(replica.tokens_per_s), "tokens/s"),
      figure("busy since start", percent(busy)),
      figure("wait for a plan", number(1000 * replica.mean_plan_wait_s, 2), "ms"),
      figure("steps", number(replica.num_steps)),
      figure("preemptions", number(queue.num_preemptions))),
    blockBar(kv), blockKey(kv),
    make("ul", { class: "ranks" }, ...replica.ranks.map((rank) =>
      make("li", {}, make("b", {}, `rank ${rank.rank}`), ` ${rank.device} on ${rank.node} · ${rank.stage}`))));
}

function nodeTable(nodes) {
  if (!nodes.length) return "";
  const rows = nodes.map((node) => make("tr", {},
    make("td", {}, node.node_id.slice(0, 12)), make("td", {}, node.address),
    make("td", {}, Object.entries(node.resources).map(([name, amount]) => `${number(amount)} ${name}`).join(", ")),
    make("td", {}, node.draining ? "draining" : "")));
  const head = make("tr", {}, ...["node", "address", "resources", ""].map((name) => make("th", {}, name)));
  return make("div", { class: "sheet" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

// Blocks

function drawLegend(counts) {
  element("legend").replaceChildren(...STATES.map((state, code) => {
    const sample = make("canvas", {});
    drawSample(sample, code);
    return make("li", {}, sample, `${state} ${number(counts[code])}`);
  }));
}

function drawMap(map) {
  element("map").hidden = !map;
  if (!map) return;
  if (map.problem) {
    element("map-caption").textContent = map.problem;
    return;
  }
  const sampled = map.stride > 1 ? ` Every ${map.stride}th block is shown.` : "";
  element("map-caption").textContent =
    `${number(map.num_blocks)} blocks of ${view.replica}, in the order of their numbers.${sampled} ` +
    "Held blocks have the color of their sequence.";
  drawLegend(blocks.draw(map));
}

// Frames

function draw(frame) {
  const { fleet } = frame;
  if (!view.replica && fleet.replicas.length) select(fleet.replicas[0].replica_id);
  element("problem").hidden = !fleet.problem;
  element("problem").textContent = fleet.problem && `The fleet's state is out of date: ${fleet.problem}`;
  element("models").replaceChildren(...fleet.traffic.map((traffic) => modelSheet(traffic, fleet)));
  element("replicas").replaceChildren(...fleet.replicas.map(replicaSheet));
  element("nodes").replaceChildren(nodeTable(fleet.nodes));
  drawMap(frame.blocks);
}

function showConnection() {
  const silentMs = Date.now() - view.heardAt;
  const isSilent = silentMs > SILENT_MS;
  const since = new Date(view.heardAt).toLocaleTimeString();
  element("connection").className = isSilent ? "silent" : "";
  element("connection").textContent = isSilent
    ? `no answer since ${since}, ${duration(silentMs / 1000)}${view.problem ? ` (${view.problem})` : ""}`
    : view.frame ? `live · quire ${view.frame.version}` : "connecting";
}

async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) if (event.startsWith("data: ")) onEvent(JSON.parse(event.slice(6)));
  }
}

let connection = new AbortController();

/** Show the blocks of another replica: the stream is opened anew for it. */
function select(replica) {
  if (replica === view.replica) return;
  view.replica = replica;
  connection.abort();
}

async function listen() {
  connection = new AbortController();
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const url = `ui/events?replica=${encodeURIComponent(view.replica)}`;
  const response = await fetch(url, { headers, signal: connection.signal });
  element("login").hidden = response.ok;
  if (response.status === 401 || response.status === 403) return askForToken();
  if (!response.ok) throw new Error((await response.json()).error.message);
  await readEvents(response.body, (frame) => {
    Object.assign(view, { frame, heardAt: Date.now(), problem: "" });
    showConnection();
    draw(frame);
  });
}

function askForToken() {
  element("login").hidden = false;
  return new Promise((resolve) => {
    element("login").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN_KEY, element("token").value);
      view.heardAt = Date.now();
      resolve();
    }, { once: true });
  });
}

setInterval(showConnection, 500);
addEventListener("resize", () => view.frame && drawMap(view.frame.blocks));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.frame && draw(view.frame));
for (;;) {
  const shown = view.replica;
  try {
    await listen();
  } catch (error) {
    if (error.name !== "AbortError") view.problem = error.message;
  }
  // A server that ended the stream may be restarting; a stream for another replica opens at once.
  if (shown === view.replica) await new Promise((resolve) => setTimeout(resolve, 1000));
}
