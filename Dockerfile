# The app for a server: planning alone, so neither torch nor a GPU. docs/deploy.md; tests/test_deploy.py runs it.
FROM python:3.12-slim
WORKDIR /srv/vramwise
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HOME=/tmp
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY planner ./planner
COPY profiler ./profiler
COPY trainer ./trainer
COPY app ./app
COPY data ./data
RUN pip install -c constraints.txt ".[app]"
RUN rm -rf planner profiler trainer app data
USER 1000
EXPOSE 8501
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8501/_stcore/health')"]
CMD ["vramwise", "app", "--address", "0.0.0.0", "--port", "8501", "--headless"]
