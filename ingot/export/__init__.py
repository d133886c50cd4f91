"""Export a model to other formats: ONNX for onnxruntime-genai, safetensors, and a torch ExportedProgram."""
