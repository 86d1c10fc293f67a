/* A browser starts no worker from a disk.  There, the search runs in a frame instead. */
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement('iframe');
      frame.hidden = true;
      document.documentElement.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => {
        const event = new MessageEvent('message', {data});
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.scope.importScripts = () => Promise.resolve();
      const script = frame.contentDocument.createElement('script');
      script.src = url;
      script.onload = () => { this.ready = true; this.waiting.splice(0).forEach(data => this.postMessage(data)); };
      frame.contentDocument.head.appendChild(script);
    }
    postMessage(data) {
      if (this.ready) this.scope.dispatchEvent(new MessageEvent('message', {data}));
      else this.waiting.push(data);
    }
    terminate() {}
  };
}
