"""Messages, Anthropic's protocol: its requests become Asks, the steps of an answer become events or one message."""
