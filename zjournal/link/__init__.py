"""The seam between the API process and the engine process: what crosses the socket, and the API's handle."""
