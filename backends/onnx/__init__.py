"""The onnx backend: translates regions (connected calls) to ONNX models, which ONNX Runtime runs on a CPU."""
