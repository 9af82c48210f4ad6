"""The application: plan, assembly, HTTP application, life cycle of the process."""
