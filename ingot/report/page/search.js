// What a search wants: all of its words in a text, and of one layer where it says "layer 3".

/** A test of a text and a layer; null for a search of nothing. */
export function matcher(query) {
  const [said, layer] = query.match(/\blayer (\d+)\b/i) ?? ["", null];
  const words = query.replace(said, " ").toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length && layer === null) return null;
  return (text, ofLayer) => {
    const searched = text.toLowerCase();
    return (layer === null || ofLayer === Number(layer)) && words.every((word) => searched.includes(word));
  };
}
