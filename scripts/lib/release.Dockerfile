FROM debian:bookworm-slim
# git and ssh: remote Docker hosts and repositories.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates git openssh-client \
    && rm -rf /var/lib/apt/lists/*
COPY orchestrate /opt/orchestrate
RUN ln -s /opt/orchestrate/orchestrate /opt/orchestrate/orchestrate-bench /usr/local/bin/
WORKDIR /opt/orchestrate
ENTRYPOINT ["/usr/local/bin/orchestrate"]
