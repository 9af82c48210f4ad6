"""What this project publishes about a GPU, measured in one call of at most 470 s: `make gpu`."""
