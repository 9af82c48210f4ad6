"""HTTP below the routes: connections, TLS, authentication, request bodies, and the memory budget of calls."""
