"""HTTP below the routes: connections, TLS, authentication, bodies, and the memory that calls may hold."""
