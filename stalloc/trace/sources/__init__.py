"""One file an origin: each reads one kind of file and returns Traces, or says in one sentence why it cannot."""
