"""Callbacks for other people's trainers. Each module needs the package it is named after."""
