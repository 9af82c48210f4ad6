"""The HTTP interface: inference routes, administration, the OpenAPI document, the dashboard."""
