// Names of steps and their programs, for readers.

/** The program of a step: its entry unless that is main, and its bucket class if it has one. */
export function bucketName({ entry, bucket }) {
  return [entry === "main" ? "" : entry, bucket ?? ""].filter(Boolean).join("@");
}

/** The name of a step: its pass, and its program if there are several. */
export function stepName(step) {
  const where = bucketName(step);
  return where ? `${step.name}@${where}` : step.name;
}
