"""The HTTP protocols: a body becomes an `Ask` here, and the steps of an answer become bytes here. Imports nothing."""
