// The map of KV blocks on a canvas. Each state has a pattern of its own, so that it can be read without color.

export const STATES = ["empty", "cached", "fenced", "held", "shared"];
const [EMPTY, CACHED, FENCED, HELD, SHARED] = STATES.keys();
const MAX_CELL = 15;
const MIN_CELL = 5;
const MAX_HEIGHT = 420;
const MAX_ROWS_LISTED = 12;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** Hues of neighboring rows differ by the golden angle, so that any number of rows stays distinct. */
const hueOf = (row) => (row * 137.508 + 172) % 360;
const colorOf = (row) => `hsl(${hueOf(row)} 48% ${style("--held")})`;

function stroke(context, color, ...segments) {
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.beginPath();
  for (const [fromX, fromY, toX, toY] of segments) {
    context.moveTo(fromX, fromY);
    context.lineTo(toX, toY);
  }
  context.stroke();
}

/** Draw one block: empty is an outline, cached a slash, fenced a cross, held a square, shared a square with a dot. */
function drawCell(context, x, y, size, state, row) {
  const inner = size - (size > 7 ? 2 : 1);
  const low = x + inner, right = y + inner;
  if (state === HELD || state === SHARED) {
    context.fillStyle = row < 0 ? style("--quiet") : colorOf(row);
    context.fillRect(x, y, inner, inner);
    if (state === SHARED) {
      const dot = Math.max(2, inner / 3);
      context.fillStyle = style("--sheet");
      context.fillRect(x + (inner - dot) / 2, y + (inner - dot) / 2, dot, dot);
    }
    return;
  }
  context.strokeStyle = state === FENCED ? style("--warn") : style("--line");
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
  if (state === CACHED) stroke(context, style("--quiet"), [x + 1, right - 1, low - 1, y + 1]);
  if (state === FENCED) stroke(context, style("--warn"), [x + 1, y + 1, low - 1, right - 1], [x + 1, right - 1, low - 1, y + 1]);
}

/** Size a canvas in CSS pixels; return its context, sharp on every screen. */
function contextOf(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

export function drawSample(canvas, state) {
  drawCell(contextOf(canvas, 14, 14), 0, 0, 14, state, 0);
}

export class BlockMap {
  /** @param holder, tip: of the cells. @param table: of the sequences. */
  constructor(holder, tip, table) {
    this.canvas = holder.querySelector("canvas");
    this.tip = tip;
    this.table = table;
    this.map = null;
    this.lit = -1; // row under the pointer
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.unpoint());
  }

  /** Draw the map; return the number of shown blocks by state. */
  draw(map) {
    this.map = map;
    this.drawCells();
    this.drawSequences();
    const counts = STATES.map(() => 0);
    for (const state of map.states) counts[Number(state)] += 1;
    return counts;
  }

  drawCells() {
    const { states, rows } = this.map;
    const width = this.canvas.parentElement.clientWidth;
    const fits = (size) => Math.ceil(states.length / Math.floor(width / size)) * size <= MAX_HEIGHT;
    this.size = MAX_CELL;
    while (this.size > MIN_CELL && !fits(this.size)) this.size -= 1;
    this.columns = Math.max(1, Math.floor(width / this.size));
    const context = contextOf(this.canvas, width, Math.ceil(states.length / this.columns) * this.size);
    for (let cell = 0; cell < states.length; cell += 1) {
      context.globalAlpha = this.lit < 0 || rows[cell] === this.lit ? 1 : 0.25;
      const x = (cell % this.columns) * this.size, y = Math.floor(cell / this.columns) * this.size;
      drawCell(context, x, y, this.size, Number(states[cell]), rows[cell]);
    }
  }

  drawSequences() {
    const listed = this.map.sequences.slice(0, MAX_ROWS_LISTED).map((sequence) => this.sequenceRow(sequence));
    const rest = this.map.sequences.length - listed.length;
    if (rest > 0) listed.push(rowOf(["", `and ${rest} more`, "", ""]));
    if (!listed.length) listed.push(rowOf(["", "no sequence runs", "", ""]));
    this.table.tBodies[0].replaceChildren(...listed);
  }

  sequenceRow({ row, request_id, num_tokens, num_blocks }) {
    const line = rowOf(["", request_id, num_tokens.toLocaleString("en"), num_blocks.toLocaleString("en")]);
    const swatch = document.createElement("i");
    swatch.style.background = colorOf(row);
    line.cells[0].append(swatch);
    line.cells[1].className = "id";
    line.cells[1].title = request_id;
    line.classList.toggle("lit", row === this.lit);
    line.addEventListener("pointerenter", () => this.light(row));
    line.addEventListener("pointerleave", () => this.light(-1));
    return line;
  }

  light(row) {
    if (row === this.lit) return;
    this.lit = row;
    this.drawCells();
    for (const [index, line] of [...this.table.tBodies[0].rows].entries()) {
      line.classList.toggle("lit", row >= 0 && this.map.sequences[index]?.row === row);
    }
  }

  point(event) {
    if (!this.map) return;
    const column = Math.floor(event.offsetX / this.size), line = Math.floor(event.offsetY / this.size);
    const cell = line * this.columns + column;
    if (column >= this.columns || cell >= this.map.states.length) return this.unpoint();
    const row = this.map.rows[cell];
    const holder = this.map.sequences.find((sequence) => sequence.row === row);
    this.tip.textContent = `block ${1 + cell * this.map.stride}: ${STATES[Number(this.map.states[cell])]}` +
      (holder ? `, ${holder.request_id}` : "");
    this.tip.hidden = false;
    const isRight = event.offsetX > this.canvas.clientWidth / 2;
    this.tip.style.left = isRight ? "" : `${event.offsetX + 12}px`;
    this.tip.style.right = isRight ? `${this.canvas.clientWidth - event.offsetX + 12}px` : "";
    this.tip.style.top = `${event.offsetY + 12}px`;
    this.light(row);
  }

  unpoint() {
    this.tip.hidden = true;
    this.light(-1);
  }
}

function rowOf(texts) {
  const line = document.createElement("tr");
  for (const text of texts) line.insertCell().textContent = text;
  return line;
}
