// Browsers start no Worker in a page that is opened as a file, and the search is one. Here its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.isLoaded = new Promise((resolve) => {
        window.fileWorkers = [...(window.fileWorkers || []), { worker: this, resolve }];
      });
      const own = `parent.fileWorkers[${window.fileWorkers.length - 1}]`;
      inside.document.open();
      inside.document.write(`<body><script>
        var postMessage = (data) => ${own}.worker.receive(data);
        var importScripts = (...urls) => urls.reduce((loaded, url) => loaded.then(() => new Promise((resolve) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = resolve;
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><script src="${url}" onload="${own}.resolve()"><\/script></body>`);
      inside.document.close();
    }

    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      const send = () => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.isLoaded.then(send);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
