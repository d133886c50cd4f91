"""Export a decoder as an ONNX model with its cache as inputs and outputs, in the form that onnxruntime-genai reads."""
