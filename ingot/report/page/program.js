// The program after each step: nodes by key, their users, and the changes of the step.

const FIELDS = ["kind", "name", "op", "text", "type", "placement", "backend", "origin", "layer"];
const SHOWN = new Set(["call", "param", "input", "state", "dim", "mesh"]);

/** Pieces of a text: names with their percent sign, strings, and the text between them. */
export function pieces(text) {
  return text.split(/("(?:[^"\\]|\\.)*"|%[\w.]+)/);
}

/** The names that a text refers to, in order. */
export function names(text) {
  return pieces(text).flatMap((piece) => (piece.startsWith("%") ? [piece.slice(1)] : []));
}

/** The line as the program's text has it. */
export function lineText(node) {
  const type = [node.type, node.placement].filter(Boolean).join(" ");
  switch (node.kind) {
    case "call": {
      const backend = node.backend && ` @${node.backend}`;
      return `%${node.name} = ${node.op}(${node.text}) : ${type}${backend}${node.origin && `  # ${node.origin}`}`;
    }
    case "param":
      return `param ${node.name}: ${type} = ${node.text}`;
    case "state":
      return `state ${node.name}: ${node.op} ${type} ${node.text}`;
    case "input":
      return `input ${node.name}: ${type}`;
    default:
      return [node.kind, node.name, node.text].filter(Boolean).join(" ");
  }
}

/** Pairs of an output's name and its value, from the text after `return`. */
function results(outputs) {
  return outputs ? outputs.split(", ").map((one) => one.split("=%")) : [];
}

/** All programs of a report; each is made on first use. */
export class Programs {
  constructor(data) {
    this.steps = data.steps;
    this.records = data.lines.map((line) => Object.fromEntries(FIELDS.map((field, at) => [field, line[at]])));
    this.lines = new Map();
    this.programs = new Map();
    this.differences = new Map();
  }

  /** The numbers of a step's lines, in order. */
  linesOf(number) {
    if (!this.lines.has(number)) {
      const { before, delta } = this.steps[number];
      const base = before === null ? [] : this.linesOf(before);
      const made = [];
      let place = 0;
      for (const [begin, end, lines] of delta) {
        made.push(...base.slice(place, begin), ...lines);
        place = end;
      }
      this.lines.set(number, [...made, ...base.slice(place)]);
    }
    return this.lines.get(number);
  }

  /** The program after a step: `nodes` by key in order, a name in a region has the region's name first; `header`. */
  at(number) {
    if (!this.programs.has(number)) this.programs.set(number, this.#read(number));
    return this.programs.get(number);
  }

  #read(number) {
    const nodes = new Map();
    const regions = [];
    const program = { nodes, regions, header: "", outputs: "" };
    let region = null;
    for (const line of this.linesOf(number)) {
      const record = this.records[line];
      if (record.kind === "program") program.header = record.name;
      else if (record.kind === "region")
        regions.push((region = { name: record.name, backend: record.op, outputs: "" }));
      else if (record.kind === "end") region = null;
      else if (record.kind === "return") (region ?? program).outputs = record.name;
      else if (SHOWN.has(record.kind)) {
        const key = region ? `${region.name}/${record.name}` : record.name;
        nodes.set(key, { ...record, key, line, region: region?.name ?? null });
      }
    }
    return program;
  }

  /** The changes of a step: `marks` of nodes by key, "added" or "changed"; `removed` nodes, with the key before each. */
  changes(number) {
    if (!this.differences.has(number)) this.differences.set(number, this.#compare(number));
    return this.differences.get(number);
  }

  #compare(number) {
    const marks = new Map();
    const removed = [];
    const { before } = this.steps[number];
    if (before !== null && this.steps[number].delta.length) {
      const old = this.at(before).nodes;
      const now = this.at(number).nodes;
      for (const [key, node] of now) {
        if (!old.has(key)) marks.set(key, "added");
        else if (old.get(key).line !== node.line) marks.set(key, "changed");
      }
      let after = null;
      for (const [key, node] of old) {
        if (now.has(key)) after = key;
        else removed.push({ ...node, after });
      }
    }
    const changed = [...marks.values()].filter((mark) => mark === "changed").length;
    return { marks, removed, counts: { added: marks.size - changed, removed: removed.length, changed } };
  }

  /** The node of a name in the scope of `region`, in the program after a step. */
  resolve(number, name, region = null) {
    const { nodes } = this.at(number);
    return (region && nodes.get(`${region}/${name}`)) || nodes.get(name) || null;
  }

  /** The key of the node that is an output of the program after a step; null if it has no such output. */
  output(number, name) {
    return results(this.at(number).outputs).find(([output]) => output === name)?.[1] ?? null;
  }

  /** The nodes that read a node, and the results of the program or region that it defines. */
  users(number, node) {
    const program = this.at(number);
    const users = [...program.nodes.values()].filter(
      (other) => other.kind === "call" && other.region === node.region && names(other.text).includes(node.name),
    );
    const block = node.region ? program.regions.find((region) => region.name === node.region) : program;
    return {
      users,
      results: results(block.outputs).flatMap(([result, value]) => (value === node.name ? [result] : [])),
    };
  }

  /** The steps of one line of descent through a step: from the traced program on, to the end of a bucket class. */
  lineage(number) {
    const line = [];
    for (let at = number; at !== null; at = this.steps[at].before) line.unshift(at);
    for (let at = number; at !== -1;) {
      at = this.steps.findIndex((step) => step.before === at);
      if (at !== -1) line.push(at);
    }
    return line;
  }

  /** The history of a key along a line of descent: pairs of a step and "added", "changed" or "removed". */
  life(number, key) {
    return this.lineage(number).flatMap((step) => {
      const { marks, removed } = this.changes(step);
      if (this.steps[step].before === null) return this.at(step).nodes.has(key) ? [[step, "added"]] : [];
      const mark = marks.get(key) ?? (removed.some((node) => node.key === key) ? "removed" : null);
      return mark ? [[step, mark]] : [];
    });
  }
}
