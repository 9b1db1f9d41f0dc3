"use strict";
(() => {
  // A row: [parent, kind, depth, start, text, end, residency, place, span bytes, checkpoint, its bytes, pin names,
  // in use, uses, last used, nodes below, their tokens, their bytes]. In preorder, so all below a row follows it.
  const BATCH = 200, FIRST = 150, REVEALED = 100, TOP = 1;
  const main = document.getElementById("rows"), found = document.getElementById("found");
  let rows = [], longest = 1, children = [], tops = [], size = [];
  // What the reader did goes by the keys of rows, which stay the same when another state of the tree is shown.
  let keys = [], known = new Set(), open = new Set(), told = new Set();
  const shown = new Map(), elements = new Map();
  let way = [], onWay = new Set(), wayRoot = "";
  let matches = [], matched = new Set(), current = -1;

  const number = (value) => value.toLocaleString("en-US");
  const count = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;
  const bytes = (value) => {
    if (value < 1024) return count(value, "byte");
    let unit = 0;
    for (; value >= 1023.95 && unit < 4; unit++) value /= 1024;
    return `${value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ` +
      ["bytes", "KiB", "MiB", "GiB", "TiB"][unit];
  };
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const left = (tokens) => `${((100 * tokens) / longest) * 0.94}%`;

  function draw(index) {
    const row = rows[index], [, kind, depth, start, text] = row;
    const line = element("div", `row ${kind}`), what = element("span", "what"), label = element("span", "label");
    line.dataset.index = index;
    what.style.paddingLeft = `${Math.min(depth, 30) * 16}px`;
    const twist = element("button", "twist", open.has(keys[index]) ? "\u25be" : "\u25b8");
    twist.disabled = !children[index].length;
    twist.setAttribute("aria-expanded", open.has(keys[index]));
    twist.setAttribute("aria-label", "expand or collapse");
    twist.onclick = () => toggle(index);
    what.append(twist, label);
    line.append(what);
    if (kind === "more") label.textContent = `\u2026 ${text}`;
    if (kind === "namespace") label.append("namespace ", element("bdi", "", text));
    if (kind === "node") drawNode(row, index, line, label);
    if (kind !== "node") line.append(element("span"), element("span"), element("span"), element("span", "axis"));
    if (matched.has(index)) line.classList.add("found");
    if (onWay.has(index)) line.classList.add("way");
    elements.set(index, line);
    return line;
  }

  function drawNode(row, index, line, label) {
    const [, , , start, text, end, residency, , spanBytes, checkpoint, pointBytes, names, inUse] = row;
    if (names) for (const name of names.length ? names : ["pinned"]) label.append(element("bdi", "tag", name));
    if (inUse) label.append(element("span", "tag use", "in use"));
    label.append(element("bdi", "", text === null ? `[${number(start)}, ${number(end)})` : text));
    if (told.has(keys[index])) tell(index, line, label);
    label.onclick = () => select(index);
    const axis = element("span", "axis"), bar = element("i", `bar ${residency}${inUse ? " open" : ""}`);
    bar.style.left = left(start);
    bar.style.width = left(end - start);
    axis.append(bar);
    let at = 4;
    for (const [present, sign] of [[checkpoint, "checkpoint"], [names, "pin"]]) {
      if (!present) continue;
      const mark = element("i", sign);
      mark.style.left = `calc(${left(end)} + ${at}px)`;
      axis.append(mark);
      at += 14;
    }
    line.append(element("span", "", `${number(start)} \u2013 ${number(end)}`), element("span", "", number(end - start)), 
      element("span", "", bytes(spanBytes + pointBytes)), axis);
  }

  function select(index) {
    const line = elements.get(index), label = line.querySelector(".label");
    if (told.delete(keys[index])) {
      line.classList.remove("selected");
      label.querySelector(".info").remove();
    } else {
      told.add(keys[index]);
      tell(index, line, label);
    }
  }

  function tell(index, line, label) {
    line.classList.add("selected");
    label.append(element("span", "info", info(rows[index])));
  }

  function info([, , , start, , end, , place, spanBytes, checkpoint, pointBytes, names, , uses, last, ...below]) {
    const parts = [`[${number(start)}, ${number(end)}) ${count(end - start, "token")}`, `${bytes(spanBytes)} ${place}`];
    if (checkpoint) parts.push(`checkpoint (${checkpoint}, ${bytes(pointBytes)})`);
    if (names) parts.push(names.length ? `pinned as ${names.join(", ")}` : "pinned");
    parts.push(`used ${count(uses, "time")}, last at tick ${number(last)}`);
    if (below[0]) parts.push(`below: ${count(below[0], "node")}, ${count(below[1], "token")}, ${bytes(below[2])}`);
    return parts.join(" \u00b7 ");
  }

  // The rows below `index` that are to be seen, in order; a button where there are more children than a batch.
  function visible(index) {
    const list = document.createDocumentFragment(), stack = [];
    const push = (parent) => {
      const all = parent < 0 ? tops : children[parent], limit = shownOf(parent);
      if (all.length > limit) stack.push(() => rest(parent, all.length - limit));
      for (let place = Math.min(all.length, limit) - 1; place >= 0; place--) stack.push(all[place]);
    };
    push(index);
    while (stack.length) {
      const next = stack.pop();
      if (typeof next === "function") { list.append(next()); continue; }
      list.append(draw(next));
      if (open.has(keys[next])) push(next);
    }
    return list;
  }

  function rest(parent, hidden) {
    const line = element("div", "row more"), button = element("button", "", `Show ${count(hidden, "more branch")}`
      .replace("branchs", "branches"));
    line.dataset.index = parent < 0 ? rows.length : parent + 0.5;
    line.dataset.restOf = parent;
    button.onclick = () => {
      shown.set(keyOf(parent), shownOf(parent) + BATCH);
      redraw();
    };
    line.append(button);
    return line;
  }

  function redraw() {
    elements.clear();
    main.replaceChildren(visible(-1));
  }

  function toggle(index) {
    const line = elements.get(index), twist = line.querySelector(".twist");
    const opens = !open.has(keys[index]);
    if (opens) {
      open.add(keys[index]);
      line.after(visible(index));
    } else {
      open.delete(keys[index]);
      for (let next = line.nextElementSibling; next && isBelow(next, index); next = line.nextElementSibling) {
        elements.delete(Number(next.dataset.index));
        next.remove();
      }
    }
    twist.textContent = opens ? "\u25be" : "\u25b8";
    twist.setAttribute("aria-expanded", opens);
  }

  function isBelow(line, index) {
    const at = Number(line.dataset.index);
    return at > index && at < index + 1 + size[index] || Number(line.dataset.restOf) === index;
  }

  function reveal(index) {
    for (let at = index; at >= 0; at = rows[at][0]) {
      const parent = rows[at][0], place = (parent < 0 ? tops : children[parent]).indexOf(at);
      if (place >= shownOf(parent)) shown.set(keyOf(parent), place + 1);
      if (parent >= 0) open.add(keys[parent]);
    }
  }

  function search() {
    find();
    current = -1;
    matches.slice(0, REVEALED).forEach(reveal);
    redraw();
    step();
  }

  function find() {
    const wanted = document.getElementById("search").value.trim().toLowerCase();
    matches = [];
    if (wanted) rows.forEach((row, index) => {
      const pinned = row[1] === "node" && row[11] ? `pinned ${row[11].join(" ")}` : "";
      const hay = row[1] === "node" ? `${row[4] || ""} ${row[9] && `checkpoint ${row[9]}`} ${pinned}` : row[4];
      if (hay.toLowerCase().includes(wanted)) matches.push(index);
    });
    matched = new Set(matches);
    const some = matches.length > REVEALED ? `, the first ${REVEALED} expanded` : "";
    found.textContent = wanted ? `${count(matches.length, "match")}${some}`.replace("matchs", "matches") : "";
  }

  // Mark the nodes of a namespace that end at these offsets, one below the other, as far as they are still there.
  function mark(namespace, ends) {
    [way, wayRoot] = [ends, namespace];
    follow();
    [...onWay].forEach(reveal);
    redraw();
  }

  function follow() {
    const head = tops.find((index) => rows[index][1] === "namespace" && rows[index][4] === wayRoot);
    let below = head === undefined ? tops : children[head];
    onWay = new Set();
    for (const end of way) {
      const fits = below.filter((index) => rows[index][1] === "node" && rows[index][5] === end);
      if (fits.length !== 1) return;
      onWay.add(fits[0]);
      below = children[fits[0]];
    }
  }

  function step() {
    if (!matches.length) return;
    current = (current + 1) % matches.length;
    reveal(matches[current]);
    if (!elements.has(matches[current])) redraw();
    elements.get(matches[current]).scrollIntoView({ block: "center" });
  }

  function axis() {
    let unit = 1;
    document.getElementById("axis").replaceChildren();
    while (longest / unit > 6) unit *= String(unit)[0] === "2" ? 2.5 : 2;
    for (let tick = 0; tick <= longest; tick += unit) {
      const label = element("b", "", number(tick));
      if (!tick) label.append(element("span", "", " tokens"));
      label.style.left = left(tick);
      document.getElementById("axis").append(label);
    }
  }

  const keyOf = (index) => (index < 0 ? TOP : keys[index]);
  const shownOf = (parent) => shown.get(keyOf(parent)) || BATCH;

  // A row's key says how it begins and hangs below whom. Siblings that look alike are numbered.
  function keyed() {
    const taken = new Set();
    keys = [];
    for (const [parent, kind, , , text, end] of rows) {
      let key = keyOf(parent);
      for (const letter of `${kind} ${kind === "node" && text === null ? end : text.slice(0, 16)}`)
        key = Math.imul(key ^ letter.charCodeAt(0), 16777619);
      while (taken.has(key)) key = (key + 1) | 0;
      taken.add(key);
      keys.push(key);
    }
  }

  // What was there stays open or closed; of what is new as many levels are open as fit a screen or three.
  function openNew() {
    const queue = [...tops];
    open = new Set(keys.filter((key) => open.has(key)));
    let seen = tops.length, isFull = false;
    for (const index of queue) {
      const more = Math.min(children[index].length, BATCH), key = keys[index];
      isFull ||= seen + more > FIRST;
      if (!more || (known.has(key) ? !open.has(key) : isFull)) continue;
      seen += more;
      open.add(key);
      for (const child of children[index]) queue.push(child);
    }
    known = new Set(keys.filter((_, index) => children[index].length));
  }

  function show(tree) {
    ({ rows, longest } = tree);
    children = rows.map(() => []);
    tops = [];
    size = rows.map(() => 0);
    rows.forEach((row, index) => (row[0] < 0 ? tops : children[row[0]]).push(index));
    for (let index = rows.length - 1; index >= 0; index--)
      if (rows[index][0] >= 0) size[rows[index][0]] += 1 + size[index];
    keyed();
    openNew();
    find();
    follow();
    axis();
    redraw();
  }

  let waiting;
  document.getElementById("search").oninput = () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 150);
  };
  document.getElementById("search").onkeydown = (event) => { if (event.key === "Enter") step(); };
  document.getElementById("next").onclick = step;
  document.getElementById("open").onclick = () => {
    children.forEach((below, index) => { if (below.length) open.add(keys[index]); });
    redraw();
  };
  document.getElementById("close").onclick = () => { open.clear(); shown.clear(); redraw(); };
  // A page that shows one tree has it in itself; one that shows a tree as it changes calls `show` with each state.
  globalThis.prefixTree = { show, mark, element, number, bytes };
  const embedded = document.getElementById("tree");
  if (embedded) show(JSON.parse(embedded.textContent));
})();
