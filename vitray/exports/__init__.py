"""Exports of a network, each with a proof of its equality."""
