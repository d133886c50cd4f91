"""The tensorrt backend: translates regions (connected calls) to ONNX models, which TensorRT compiles for a GPU."""
