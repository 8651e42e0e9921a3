"""gRPC and protobuf of the cache service: methods, the step stream, statuses and conversions."""
