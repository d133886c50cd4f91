// A search matches if a text has all its words, in one layer only if it says "layer 3".

/** A test of a text and a layer; null for an empty search. */
export function matcher(query) {
  const [said, layer] = query.match(/\blayer (\d+)\b/i) ?? ["", null];
  const words = query.replace(said, " ").toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length && layer === null) return null;
  return (text, ofLayer) => {
    const searched = text.toLowerCase();
    return (layer === null || ofLayer === Number(layer)) && words.every((word) => searched.includes(word));
  };
}
