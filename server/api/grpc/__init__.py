"""The Open Inference Protocol over gRPC: each call is translated to the HTTP request that serves it, and back."""
