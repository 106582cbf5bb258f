"""How model families write tools, and how a conversation becomes a prompt. Dialects never import each other."""
