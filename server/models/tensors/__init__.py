"""Models of named tensors: users' classes, exported programs and ONNX files."""
