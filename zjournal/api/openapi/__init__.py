"""The description of the HTTP API that programs read: OpenAPI, made from the types that read the bodies."""
