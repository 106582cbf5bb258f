"""The kernels, imported as zjournal.kernels. Only a docstring: other packages probe `import kernels` by name."""
