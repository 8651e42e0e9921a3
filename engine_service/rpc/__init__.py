"""gRPC and protobuf of the engine service: methods, decoding of requests, encoding of responses, stream buffers."""
